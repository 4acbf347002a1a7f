"""The Triton twin of attention in slots: on a CUDA GPU, or on the CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from triton_twins import DEVICE, DTYPE, MARKS, TOLERANCE

from flatout.kernels.attention.slots import slot_attention

pytest.importorskip("triton")
pytestmark = MARKS
# one token, tiles that end and do not end with the slot, a full slot
LENGTHS, PLACES = [1, 64, 65, 160, 129], 160


@pytest.mark.parametrize("variant", [{}, {"window": 70}, {"softcap": 1.5}, {"sinks": True}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "out_size"),
    [(4, 2, 64, 64), (3, 1, 80, 80), (2, 2, 96, 64), (20, 1, 128, 128), (4, 2, 8, 8)],
)
def test_it_equals_the_definition(heads, kv_heads, size, out_size, variant):
    from flatout.kernels.attention import slots_triton

    generator, count = torch.Generator().manual_seed(0), len(LENGTHS)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    # heads before tokens, as transformers has them
    q = draw(heads, count, size).transpose(0, 1)
    k, v = draw(count * PLACES, kv_heads, size), draw(count * PLACES, kv_heads, out_size)
    sinks = 2 * draw(heads) if variant.get("sinks") else None
    options = {"scale": size**-0.5, "window": None, "softcap": None, **variant, "sinks": sinks}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    wide = None if sinks is None else sinks.double()
    true = slot_attention(q.double(), k.double(), v.double(), lengths, max(LENGTHS), **{**options, "sinks": wide})
    # what lies beyond the lengths, or before a window, is not read
    places, lengths_on_cpu = torch.arange(PLACES), torch.tensor(LENGTHS)[:, None]
    unread = (places >= lengths_on_cpu) | (places < lengths_on_cpu - (variant.get("window") or PLACES))
    k[unread.flatten()] = v[unread.flatten()] = float("nan")
    mine = slots_triton.attend(q, k, v, lengths, **options)
    assert mine.shape == (count, heads, out_size)
    assert ((mine.double() - true).norm() / true.norm()).item() < TOLERANCE
