"""Where tests of Triton's twins run: on a CUDA GPU, or on the CPU with TRITON_INTERPRET=1."""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA GPU or TRITON_INTERPRET=1"
    ),
]
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# Triton's interpreter has no bf16 products
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = 1e-2 if ON_GPU else 2e-3
