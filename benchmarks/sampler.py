"""Sampling on one GPU: new tokens a second of our sampler and of transformers' `generate`, with the same weights.

    python benchmarks/sampler.py [--shapes 1.7b 8b-lora] [--prompts 64] [--completions 8] [--new 256] [--length 128]

Weights are random, so no answer ends early. Each row is one JSON line: tokens a second over the whole call (prompts
included), the peak of allocated memory, and for ours how far log-probabilities are from those of the packed pass that
trains. `plain` runs the same steps without CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.models.load.model import load_model
from flatout.models.lora.fused import fuse_layers
from flatout.models.lora.layer import add_lora, lora_layers
from flatout.models.model_with_loss import next_logits
from flatout.models.selftest import own_attention
from flatout.rollout.in_process import InProcess, packed_logprobs
from flatout.rollout.sampler import Completion, SamplingParams
from flatout.rollout.sampler_model import SamplerModel

CUDA = torch.device("cuda", 0)
_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "1.7b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def load(name: str) -> Any:
    """Return a random model of a shape as a run holds it, with fused adapters for `-lora`."""
    shape, _, adapters = name.partition("-")
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**_QWEN3, **SHAPES[shape], architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
        config = ModelConfig(name=folder, init="random", precision="bf16")
        loaded = load_model(config, method="lora", device=CUDA, seed=0)
    if adapters:
        add_lora(loaded.model, LoraConfig(rank=16), seed=0)
        for layer in lora_layers(loaded.model).values():
            layer.lora_b.data.normal_(0, 0.01)
        fuse_layers(loaded.model)
    return loaded.model.eval()


def timed(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a call returns, its seconds and its peak of allocated memory in GiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return result, {"seconds": round(seconds, 2), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def error_of(model: SamplerModel, prompts: list[list[int]], found: list[list[Completion]]) -> float:
    """Return the mean difference of one answer's log-probabilities to those of the packed pass, in nats."""
    one = found[0][0]
    true = packed_logprobs(model, [*prompts[0], *one.token_ids], len(one.token_ids))
    return float((true.cpu() - torch.tensor(one.logprobs)).abs().mean())


def plain_generate(model: Any, prompts: list[list[int]], completions: int, new: int) -> Any:
    ids = torch.tensor(prompts, device=CUDA).repeat_interleave(completions, dim=0)
    with own_attention(model):
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=True, temperature=1.0,
            top_k=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip


def measure(name: str, args: argparse.Namespace) -> None:
    model = load(name)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, _QWEN3["vocab_size"], args.length).tolist() for _ in range(args.prompts)]
    num_tokens = args.prompts * args.completions * args.new
    sampler_model = SamplerModel(
        pretrained=model, logits=lambda batch: next_logits(model, batch), device=CUDA, tolerance=0.1,
        max_pass_tokens=16384, is_padded=False, packed_context=nullcontext,
        log=lambda line: print("told:", line, flush=True),
    )  # fmt: skip

    def show(how: str, figures: dict[str, float], **more: Any) -> None:
        per_s = round(num_tokens / figures["seconds"])
        print(json.dumps({"shape": name, "how": how, "tokens_per_s": per_s, **figures, **more}), flush=True)

    for how, records in (("graphs", True), ("plain", False)):
        sampler = InProcess(sampler_model, records=records)
        for temperature in (1.0, 0.0):
            params = SamplingParams(args.new, temperature=temperature)
            # kernels are loaded, and the backend is proved, once
            sampler.sample(prompts[:2], 8, SamplingParams(20, temperature=temperature))
            found, figures = timed(partial(sampler.sample, prompts, args.completions, params))
            error = error_of(sampler_model, prompts, found)
            show(how, figures, temperature=temperature, logprob_error=round(error, 4))
            del found
            if how == "plain":
                break
    if not args.no_generate:
        plain_generate(model, prompts[:2], 2, 4)
        _, figures = timed(lambda: plain_generate(model, prompts, args.completions, args.new))
        show("generate", figures, temperature=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.7b", "8b-lora"])
    for name, value in (("prompts", 64), ("completions", 8), ("new", 256), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--no-generate", action="store_true", help="leave out transformers' generate")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, Path(__file__).name, flush=True)
    for name in args.shapes:
        with torch.no_grad():
            measure(name, args)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
