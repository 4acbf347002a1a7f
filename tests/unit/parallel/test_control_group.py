"""ControlGroup of a rank alone, and which part of a tensor a rank holds; over several ranks: tests/distributed."""

import pytest
import torch

from flatout.checkpoint.manifest import shares
from flatout.errors import ResourceError
from flatout.io.durable_io import FileFacts
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.shards import local_shard_of, local_state


def test_alone_work_is_just_done():
    def fail() -> None:
        raise ResourceError("no")

    group = ControlGroup()
    assert group.all_gather({"a": [1]}) == [{"a": [1]}]
    assert group.run_on_all_ranks(lambda: 3) == [3]
    assert group.run_on_first_rank(lambda: "x") == "x"
    with pytest.raises(ResourceError, match="no"):
        group.run_on_first_rank(fail)


def test_a_plain_tensor_is_whole_and_written_by_the_first_rank():
    weight = torch.arange(6.0).view(2, 3)
    part = local_shard_of(weight)
    assert (part.shape, part.offset, part.is_copy) == ((2, 3), (0, 0), False)
    part.local[0, 0] = 9
    assert weight[0, 0] == 9
    state = {"model": {"weight": weight}, "optimizer": {}}
    assert local_state(state, 0) == (state, {})
    assert local_state(state, 1) == ({}, {})


def test_every_file_is_hashed_by_one_rank_and_none_has_much_more_than_another():
    sizes = [900, 800, 500, 400, 300, 100, 0, 0]
    files = {f"file-{index}": FileFacts(size, "0" * 32) for index, size in enumerate(sizes)}
    taken = shares(files, 3)
    assert sorted(name for names in taken for name in names) == sorted(files)
    assert max(sum(files[name].size_bytes for name in names) for names in taken) <= 1100
    assert shares(files, 1) == [sorted(files)]
