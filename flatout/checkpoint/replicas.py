"""Check that replicas still hold the same state, so that a flipped bit in one rank's memory does not go unnoticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.shards import is_sharded, local_shard_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_drift(state: Mapping[str, Mapping[str, Tensor]], group: ControlGroup) -> None:
    """Raise CheckpointError on every rank, with the rank whose copy of a tensor differs from the others' in any bit.

    `state` maps kind -> name -> live tensor. Collective. Tensors of which every rank holds a different shard have no
    copies to compare and are skipped.
    """
    if group.rank.world == 1:
        return
    names: list[str] = []
    offsets: list[tuple[int, ...]] = []
    sums_on_device: list[Tensor] = []
    by_name: dict[str, Any] = {
        f"{kind} {name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()
    }
    for name, tensor in by_name.items():
        if is_sharded(tensor):
            axes = enumerate(tensor.placements)
            if not any(not placement.is_shard() and tensor.device_mesh.size(axis) > 1 for axis, placement in axes):
                continue
        shard = local_shard_of(tensor)
        names.append(name)
        offsets.append(shard.offset)
        # the sum of all bits as integers, modulo 2**64: exact in any order, changed by a flipped bit
        bits = shard.local.reshape(-1).view(_INTEGERS[shard.local.element_size()])
        sums_on_device.append(bits.sum(dtype=torch.int64))
    # one synchronization per device
    on_host = {
        device: iter(torch.stack([total for total in sums_on_device if total.device == device]).tolist())
        for device in {total.device for total in sums_on_device}
    }
    own_sums = [next(on_host[total.device]) for total in sums_on_device]
    answers = group.all_gather({"place": str(offsets), "sums": own_sums})
    for same_place in {answer["place"] for answer in answers}:
        sums = {rank: tuple(answer["sums"]) for rank, answer in enumerate(answers) if answer["place"] == same_place}
        counts = Counter(sums.values()).most_common(2)
        if len(counts) == 1:
            continue
        (usual, most), (_, second) = counts
        odd = [rank for rank, values in sums.items() if most == second or values != usual]
        reference = usual if most > second else sums[odd[0]]
        other = sums[odd[0] if most > second else odd[1]]
        name = next(name for name, a, b in zip(names, reference, other, strict=True) if a != b)
        who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} differ"
        raise CheckpointError(
            f"replicas have diverged: {who} in {name}, so this state was not saved; restart the run from its "
            "newest checkpoint; if it happens again, check that host's memory (ECC errors, nvidia-smi -q)"
        )
