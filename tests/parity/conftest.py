"""Shared by the parity tests: their folder is importable (tiny_models), and our attention is registered once."""

import sys
from pathlib import Path

import pytest
import torch

KERNEL_TESTS = {
    "test_attention_flash", "test_attention_forms", "test_fp8_products", "test_fused_lora", "test_head_tiled",
    "test_host_rows_gpu", "test_moe_kernel", "test_nf4", "test_nf4_kernel", "test_nf4_linear",
}  # fmt: skip

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def registered_attention():
    from tiny_models import register_truth

    from flatout.models.attention import register

    register()
    register_truth()


@pytest.fixture(autouse=True)
def poisoned_memory(request):
    """Kernel tests run in memory full of NaN: torch fills what `empty` and its like return, so reading it shows."""
    if request.module.__name__ not in KERNEL_TESTS:
        yield
        return
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
