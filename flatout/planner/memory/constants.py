"""Constants of the memory model, fitted to peaks measured on one H200.

Measured with torch 2.11, LoRA rank 16, bf16, up to 32 chat-like samples in one micro-batch (131 k: one document);
`benchmarks/throughput.py --rows memory` compares predictions with measurements:

    Qwen3-8B compiled 115.7 to 116.8 GiB at 21.0 k to 21.3 k tokens; memory budget 0.5: 69.2, 0.25: 46.2 GiB
    at 17.4 k tokens bf16 97.9, fp8 91.4, NF4 with fp8 products 88.3, recompute offload 18.4 GiB;
    recompute full 21.7 at 12.5 k, 74.7 at 131 k; trained whole with bf16 weights and 8-bit moments 115.1 at 16.8 k;
    Qwen3-1.7B trained whole at 20.8 k tokens: fp32 masters 67.5, bf16 weights 58.5, fp8 products 53.7 GiB
    Qwen3-30B-A3B at 20.8 k tokens 119.7 GiB, with adapters of experts 130.2; NF4, recompute full, 8-bit moments 23.1
    Qwen3-0.6B compiled 26.4 GiB at 19.5 k and 28.3 GiB at 21.2 k tokens; eager 34.7 GiB at 19.5 k
"""

from __future__ import annotations

from typing import Literal

Precision = Literal["bf16", "fp16", "fp32", "fp64"]

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# activations of eager layers, relative to compiled ones (norms and rotations in fp32, unfused products)
EAGER_SHARE = 1.37
# share of the activations beyond the layers' inputs that `budget` keeps
BUDGET_SHARE = 0.49
# one layer's activation gradients that coexist with its activations, relative to those
BACKWARD_SHARE = 0.38
# bytes per token and hidden element around the last norm, which runs eagerly: fp32 input and output, 16-bit output
LAST_NORM_BYTES = 10
# bytes per parameter: 8-bit moments with one scale per 256, and 4-bit weights with two levels of scales
ADAM_8BIT_BYTES = 2.03
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# values that share a scale of 8-bit moments: a divisor of the last dimension in this range (see `optim.adamw_8bit`)
ADAM_8BIT_BLOCKS = range(64, 257)
# layer inputs on the GPU while they are copied to the host or back
OFFLOAD_INPUTS = 3
# adapters of up to so many layers of one input save it in float8, with ranks up to this that add up to a multiple of
# this: `MAX_GRADIENT_RANK`, `MAX_SEGMENTS` and `RANK_MULTIPLE` of flatout.kernels
FLOAT8_RANK, FLOAT8_LAYERS, FLOAT8_RANK_MULTIPLE = 16, 3, 8
# cuBLAS workspaces, batch tensors
CONSTANT_BYTES = 64 << 20
# rows of logits that the loss head holds at a time: enough for full speed, fewer if memory is short
HEAD_TILE_ROWS = {"none": 2048, "selective": 2048, "budget": 2048, "full": 512, "offload": 128}
