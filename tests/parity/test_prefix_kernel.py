"""The Triton twin of attention to shared prefixes: on a CUDA GPU, or on the CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from triton_twins import DEVICE, DTYPE, MARKS, TOLERANCE

from flatout.kernels.attention.shared_prefix import SharedPrefixes, add_prefix_gradients, attend_to_prefixes

pytest.importorskip("triton")
pytestmark = MARKS
# prefixes, and the tokens of all suffixes of each: within a tile, over several, and empty tiles beside full ones
DOCUMENTS = [([5], [3]), ([70, 1, 130], [300, 129, 2])]
# query heads, key heads, head size
HEADS = [(4, 2, 64), (3, 1, 80), (2, 2, 256)]


def boundaries(lengths, padded):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nn.functional.pad(bounds, (0, padded), value=int(bounds[-1])).to(DEVICE, torch.int32)


def relative(mine, true):
    return ((mine.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize(("prefixes", "suffixes"), DOCUMENTS)
def test_it_equals_the_definition(prefixes, suffixes, heads, kv_heads, size, by_token):
    from flatout.kernels.attention import prefix_triton

    sizes = torch.tensor([len(prefixes), sum(prefixes), sum(suffixes), max(suffixes), max(prefixes)])
    shared = SharedPrefixes(boundaries(prefixes, 3), boundaries(suffixes, 0), sizes)
    num_tokens, tail = sum(prefixes) + sum(suffixes), 7
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    q, output, grad, q_grad = (draw(num_tokens + tail, heads, size) for _ in range(4))
    k, v, k_grad, v_grad = (draw(num_tokens + tail, kv_heads, size) for _ in range(4))
    # far below and above what the prefix adds, so that a wrong share shows
    log_sums = torch.linspace(-60, 60, num_tokens + tail, device=DEVICE).repeat(heads, 1)
    log_sums = log_sums.T.contiguous() if by_token else log_sums.contiguous().T
    scale, rows, keys = size**-0.5, *shared.spans
    exact = [tensor.double() for tensor in (q, k, v, output, log_sums)]
    attend_to_prefixes(*exact, scale, shared)
    prefix_triton.attend(q[rows], k[keys], v[keys], output[rows], log_sums[rows], shared.documents, scale)
    assert relative(output, exact[3]) < TOLERANCE
    torch.testing.assert_close(log_sums.double(), exact[4], atol=1e-2, rtol=0)

    # from here on equal inputs: the merged ones
    given = [q, k, v, exact[3].to(DTYPE), exact[4].float()]
    q, k, v, output, log_sums = given
    truth = tuple(tensor.double() for tensor in (q_grad, k_grad, v_grad))
    before = [tensor.clone() for tensor in truth]
    add_prefix_gradients(
        truth, grad.double(), (q.double(), k.double(), v.double()), output.double(), log_sums.double(), scale, shared
    )
    found = [tensor.clone() for tensor in (q_grad, k_grad, v_grad)]
    for num_processors in (1, 132):
        mine = [tensor.clone() for tensor in found]
        prefix_triton.add_gradients(
            (mine[0][rows], mine[1][keys], mine[2][keys]), grad[rows], (q[rows], k[keys], v[keys]), output[rows],
            log_sums[rows], shared.documents, scale, num_processors=num_processors,
        )  # fmt: skip
        for own, true, old in zip(mine, truth, before, strict=True):
            assert relative(own, true) < TOLERANCE
            # the part that was added, whose rounding is that of the sum
            assert relative(own.double() - old, true - old) < 0.05
