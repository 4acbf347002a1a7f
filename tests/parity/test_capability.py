"""Each compute capability has the kernels that it can run."""

from types import SimpleNamespace

import pytest
import torch

from flatout.environment import named_capability
from flatout.errors import ResourceError, UsageError
from flatout.kernels.attention import cudnn, flash
from flatout.kernels.capability import capability, choose_kernels_of
from flatout.kernels.fp8_matmul import has_fp8
from flatout.models.attention import choose_attention
from flatout.models.load.model import gpu_features, resolve_precision

CUDA = torch.device("cuda", 0)
# GPU -> capability, has float8
GPUS = {
    "T4": ("7.5", False), "A100": ("8.0", False), "4090": ("8.9", True), "H100": ("9.0", True), "B200": ("10.0", True),
}  # fmt: skip


@pytest.fixture(params=list(GPUS))
def gpu(request, monkeypatch):
    """Kernels are chosen as on this GPU, also by `load_model`, which reads the environment."""
    monkeypatch.setenv("FLATOUT_CAPABILITY", GPUS[request.param][0])
    choose_kernels_of(named_capability())
    yield GPUS[request.param]
    choose_kernels_of(None)


def test_the_named_capability_takes_the_place_of_the_gpus(gpu):
    name, float8 = gpu
    assert capability(CUDA) == tuple(map(int, name.split(".")))
    assert has_fp8(CUDA) == float8
    # a CPU stays one
    assert capability(torch.device("cpu")) == (0, 0)
    assert not has_fp8(torch.device("cpu"))


def test_a_plan_and_the_model_have_the_arithmetic_of_the_named_gpu(gpu):
    name, float8 = gpu
    choose_kernels_of(None)
    assert gpu_features(CUDA) == (name != "7.5", float8)
    assert resolve_precision("auto", CUDA) == (torch.float32 if name == "7.5" else torch.bfloat16)
    if name == "7.5":
        with pytest.raises(ResourceError, match="this GPU has no bf16 hardware"):
            resolve_precision("bf16", CUDA)
    assert resolve_precision("fp16", CUDA) == torch.float16
    assert gpu_features(torch.device("cpu")) == (False, False)


def test_packages_and_torchs_kernel_are_for_the_capabilities_that_have_them(gpu, monkeypatch):
    name, _ = gpu
    for module in (flash, cudnn):
        monkeypatch.setattr(module, "find_spec", lambda package: package)  # as if every package were installed
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    assert (flash.flash_problem(CUDA) is None) == (name in ("9.0", "10.0"))
    assert (cudnn.cudnn_problem(CUDA) is None) == (name in ("9.0", "10.0"))
    if name == "7.5":
        shape = SimpleNamespace(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        with pytest.raises(UsageError, match=r"varlen kernel needs an Ampere GPU \(compute capability 8\.0\) or newer"):
            choose_attention("varlen", shape, device=CUDA, dtype=torch.float16)


@pytest.mark.parametrize("text", ["8", "8,0", "ampere", "8.", ".9", "-8.0"])
def test_another_text_is_refused(monkeypatch, text):
    monkeypatch.setenv("FLATOUT_CAPABILITY", text)
    with pytest.raises(UsageError, match=r"expected a compute capability such as 8\.0"):
        named_capability()
