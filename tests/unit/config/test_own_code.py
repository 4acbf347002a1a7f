"""Whose fault an error in a person's file is: a fault of the machine stays as it is, a mistake names its line."""

import pytest

from flatout.config.own_code import OwnCode
from flatout.errors import UsageError

DIST = "import torch.distributed as dist"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        # as gloo tells a lost rank: from C++, in a backward pass without a frame of a collective, or inside one
        ("raise RuntimeError('[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer')", RuntimeError),
        (f"{DIST}; dist.rendezvous('nowhere://', 0, 1)", RuntimeError),
        ("class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError", RuntimeError),
        (f"{DIST}; dist.all_reduce(3)", UsageError),
        ("raise RuntimeError('gloo')", UsageError),
    ],
)
def test_a_lost_rank_and_a_gpu_are_told_from_a_mistake_in_the_file(tmp_path, line, kind):
    (tmp_path / "own.py").write_text(f"\n{line}\n")
    with pytest.raises(kind) as raised:
        OwnCode.read(f"{tmp_path / 'own.py'}:name", "objective.path", "objective").load()
    assert isinstance(raised.value, UsageError) is (kind is UsageError)
    assert kind is not UsageError or "own.py:2: the objective's own code failed" in str(raised.value)
