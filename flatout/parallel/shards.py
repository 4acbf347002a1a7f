"""This rank's local shard of a tensor: of FSDP2's DTensors, of slices of experts, and of plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# name -> (global shape, offset of the local shard)
Places = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


class LocalShard(NamedTuple):
    """This rank's shard of a tensor: `local` (the live storage) is at `offset` in a tensor of global shape `shape`."""

    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_copy: bool = False  # another rank holds the same shard and writes it


def mark_slice(tensor: Tensor, mesh: Any, dim: int) -> None:
    """Mark a plain tensor as this rank's equal slice of a larger one along `dim`, over the last dimension of `mesh`.

    Slices along a mesh's first dimension are replicas. The mark is an attribute: `detach` and copies drop it.
    """
    tensor.flatout_slice = mesh, dim  # type: ignore[attr-defined]


def is_slice(tensor: Tensor) -> bool:
    """Return whether the tensor has the mark of `mark_slice`."""
    return hasattr(tensor, "flatout_slice")


def replicas_of(tensor: Any) -> ProcessGroup | None:
    """Return the ranks that hold the same slice; None, all ranks, for a tensor that is not sliced."""
    group: ProcessGroup | None = tensor.flatout_slice[0].get_group(0) if is_slice(tensor) else None
    return group


def as_global(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a slice, or a tensor that is one if `like` is, as a DTensor over the same memory; others as they are."""
    marked: Any = tensor if like is None else like
    if not is_slice(marked):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, dim = marked.flatout_slice
    full: Tensor = DTensor.from_local(tensor.detach(), mesh, (Replicate(), Shard(dim)), run_check=False)
    return full


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor or a slice."""
    return hasattr(tensor, "to_local") or is_slice(tensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory; a plain tensor, also a slice, is returned as it is."""
    detached: Any = tensor.detach()
    part: Tensor = detached.to_local() if is_sharded(detached) else detached
    # torchao wraps weights that are gathered in fp8; an alias of one is a plain tensor
    return part if type(part) is Tensor else torch.ops.aten.alias(part)


def local_shard_of(tensor: Tensor) -> LocalShard:
    """Return this rank's shard; for a plain tensor, all of it. Raises NotImplementedError for a dim sharded twice."""
    tensor = as_global(tensor).detach()
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return LocalShard(tensor, (0,) * len(shape), shape)
    # imported here because it is slow, and neither single processes nor plain replicas need it
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    offset, is_copy = [0] * len(shape), False
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            is_copy = is_copy or coordinate[axis] > 0
            continue
        if any(isinstance(other, Shard) and other.dim == placement.dim for other in tensor.placements[:axis]):
            raise NotImplementedError(f"dimension {placement.dim} is sharded over two mesh dimensions")
        # as in torch.chunk, all shards but the last ones have the same length
        longest = -(-shape[placement.dim] // tensor.device_mesh.size(axis))
        offset[placement.dim] = min(coordinate[axis] * longest, shape[placement.dim])
    return LocalShard(local_part(tensor), tuple(offset), shape, is_copy)


def flat_offset_of(tensor: Tensor) -> int:
    """Return the index of this rank's first element in the flat global tensor, sharded along its first dimension."""
    shard = local_shard_of(tensor)
    assert shard.local.shape[1:] == shard.shape[1:], f"{shard.shape} is not sharded along its first dimension only"
    return shard.offset[0] * math.prod(shard.shape[1:]) if shard.shape else 0


def global_tensors(
    tensors: Mapping[str, Tensor],
    *,
    keep: bool,
    dtype: torch.dtype | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gather sharded tensors one by one into whole tensors in host memory; plain ones are returned as they are.

    Collective; only ranks with `keep` get the result, the others an empty dict. Floating-point tensors are cast to
    `dtype`; a tensor with two names stays shared. `gather` is for sharded tensors that are not DTensors.
    """
    known: dict[int, Any] = {}
    for tensor in tensors.values():
        if id(tensor) in known:
            continue
        full: Any = gather(tensor) if gather else as_global(tensor).detach()
        if dtype is not None and full.is_floating_point():
            full = full.to(dtype)
        in_parts = gather is not None or is_sharded(full)
        if is_sharded(full):
            # offloaded shards are gathered on the GPU, where only one tensor at a time is whole
            full = full.to(full.device_mesh.device_type).full_tensor()
        if in_parts:
            full = full.cpu() if keep else None
        known[id(tensor)] = full
    return {name: known[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def local_state(
    state: Mapping[str, Mapping[str, Tensor]], index: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Places]]:
    """Return what rank `index` writes of a state (kind -> name -> tensor): tensors and their places, by file stem.

    The first rank writes whole tensors. A shard that several ranks hold is written by the first of them.
    """
    if not any(is_sharded(tensor) for tensors in state.values() for tensor in tensors.values()):
        return ({kind: dict(tensors) for kind, tensors in state.items()} if index == 0 else {}), {}
    shares: dict[str, dict[str, Tensor]] = {}
    places: dict[str, Places] = {}
    for kind, tensors in state.items():
        shards = {name: local_shard_of(tensor) for name, tensor in tensors.items()}
        held = {k: shard for k, shard in shards.items() if not (shard.is_copy if is_sharded(tensors[k]) else index > 0)}
        if held or index == 0:
            stem = f"{kind}-rank-{index}"
            shares[stem] = {name: shard.local for name, shard in held.items()}
            places[stem] = {name: (shard.shape, shard.offset) for name, shard in held.items()}
    return shares, places
