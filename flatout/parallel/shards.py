"""Which part of a tensor this rank holds, for FSDP2's DTensors and for whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# name -> (shape of the whole, offset of the part)
Places = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a tensor: `local` (the live storage) is the box of its shape at `offset` in a tensor of
    `shape`. `is_copy` says that another rank holds the same part and writes it."""

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_copy: bool = False


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return hasattr(tensor, "to_local")


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of all parts together; DeepSpeed's stage 3 empties a weight and notes its shape beside it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def part_of(tensor: Tensor) -> Part:
    """This rank's part; a plain tensor is whole. Raises NotImplementedError for a dimension sharded twice."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return Part(tensor, shape, (0,) * len(shape))
    # importing it takes a while, which one process and replicas need not wait for
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
            raise NotImplementedError(f"dimension {placement.dim} is sharded over two mesh axes")
        # as torch.chunk: all parts but the last ones are equally long
        longest = -(-shape[placement.dim] // tensor.device_mesh.size(axis))
        offset[placement.dim] = min(coordinate[axis] * longest, shape[placement.dim])
    return Part(tensor.to_local(), shape, tuple(offset), is_copy)


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor and its offset."""
    part = part_of(tensor)
    return part.local, part.offset


def whole_tensors(
    tensors: Mapping[str, Tensor],
    *,
    keep: bool,
    dtype: torch.dtype | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Sharded tensors put together one by one, as whole tensors in host memory; plain ones as they are.

    Collective; only ranks with `keep` hold the result, the others get nothing. `dtype` casts floating ones; a tensor
    that comes twice stays one. `gather` puts one together where the tensors themselves do not know their parts.
    """
    known: dict[int, Any] = {}
    for tensor in tensors.values():
        if id(tensor) in known:
            continue
        whole: Any = gather(tensor) if gather else tensor.detach()
        if dtype is not None and whole.is_floating_point():
            whole = whole.to(dtype)
        in_parts = gather is not None or is_sharded(whole)
        if is_sharded(whole):
            # offloaded parts meet where the ranks do; only one tensor is whole on a GPU at a time
            whole = whole.to(whole.device_mesh.device_type).full_tensor()
        if in_parts:
            whole = whole.cpu() if keep else None
        known[id(tensor)] = whole
    return {name: known[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def share_of(
    state: Mapping[str, Mapping[str, Tensor]], index: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Places]]:
    """What rank `index` writes of a state (kind -> name -> tensor): tensors and their places by file stem.

    Whole tensors are the first rank's; of parts that several ranks hold, the first of them writes.
    """
    if not any(is_sharded(tensor) for tensors in state.values() for tensor in tensors.values()):
        return ({kind: dict(tensors) for kind, tensors in state.items()} if index == 0 else {}), {}
    shares: dict[str, dict[str, Tensor]] = {}
    places: dict[str, Places] = {}
    for kind, tensors in state.items():
        share: dict[str, Tensor] = {}
        place: Places = {}
        for name, tensor in tensors.items():
            part = part_of(tensor)
            if not (part.is_copy if is_sharded(tensor) else index > 0):
                share[name], place[name] = part.local, (part.shape, part.offset)
        if share or index == 0:
            shares[f"{kind}-rank-{index}"], places[f"{kind}-rank-{index}"] = share, place
    return shares, places
