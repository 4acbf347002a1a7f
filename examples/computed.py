"""A config in Python, for computed values; it has the same sections as a YAML config.

`flatout train examples/computed.py` runs this file as code, so only use files that you trust.
"""

from flatout.config.schema import BatchConfig, Config, DataConfig, LoraConfig, ModelConfig, OptimConfig, SourceConfig

SAMPLES_PER_STEP = 128
RANK = 64

config = Config(
    name=f"computed-rank-{RANK}",
    model=ModelConfig(name="Qwen/Qwen3-0.6B"),
    data=DataConfig(
        name="months",
        sources=[SourceConfig(path=f"data/chat-2025-{month:02}.jsonl") for month in range(1, 4)],
    ),
    lora=LoraConfig(rank=RANK, alpha=2 * RANK),
    batch=BatchConfig(samples_per_step=SAMPLES_PER_STEP),
    # square-root scaling from 2e-4 at 32 samples per step
    optim=OptimConfig(lr=2e-4 * (SAMPLES_PER_STEP / 32) ** 0.5),
)
