"""Rows that the GPU reads from host memory are the rows, and the host does not wait for them."""

import pytest
import torch
import torch.nn.functional as F

from flatout.kernels.host_rows import gather_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("shape", [(7,), (2, 5), (1, 0)])
def test_on_the_cpu_it_is_the_lookup(shape):
    table, ids = torch.randn(11, 6), torch.randint(0, 11, shape)
    assert torch.equal(gather_rows(table, ids), F.embedding(ids, table))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [8, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gpu_reads_pinned_rows(dtype, width):
    table = torch.randn(300, width).to(dtype).pin_memory()
    ids = torch.randint(0, 300, (1, 777), device="cuda")
    torch.cuda.synchronize()
    gather_rows(table, ids)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gather_rows(table, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), F.embedding(ids.cpu(), table))


@pytest.mark.gpu
@needs_gpu
def test_a_table_that_is_not_pinned_is_refused():
    with pytest.raises(ValueError, match="pinned"):
        gather_rows(torch.randn(3, 4), torch.zeros(2, dtype=torch.long, device="cuda"))
