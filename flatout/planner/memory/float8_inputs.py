"""What layers save of their inputs where adapters read float8 (see `flatout.models.lora.fused`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flatout.config.schema import LoraConfig
from flatout.planner.memory.constants import FLOAT8_LAYERS, FLOAT8_RANK, FLOAT8_RANK_MULTIPLE
from flatout.planner.shape import Linear, ModelShape


class Float8Inputs(NamedTuple):
    """Bytes per token and layer: `norms` and `products` fewer of norms' outputs and MLPs' products, `copies` more."""

    norms: float = 0.0
    products: float = 0.0
    copies: float = 0.0


def float8_inputs(shape: ModelShape, lora: LoraConfig, element_bytes: int) -> Float8Inputs:
    """Return how the bytes change that layers save, if their products are in float8.

    Within a module, the last linear layer is taken to read what the module computed, all others what the module got.
    Attention saves its output anyway, and a float8 copy of it comes beside that.
    """
    targets, norms, products, copies = shape.targeted(lora), 0, 0, 0
    for index, layer in enumerate(shape.layers):
        modules: dict[str, list[Linear]] = {}
        for linear in layer.linears:
            modules.setdefault(linear.name.rpartition(".")[0], []).append(linear)
        names = {linear.name: f"{shape.layers_path}.{index}.{linear.name}" for linear in layer.linears}
        adapters = {linear: lora.of_layer(name) for linear, name in names.items() if name in targets}
        for *readers, last in modules.values():
            if readers:
                norms += readers[0].num_in * _fewer_bytes(adapters, readers, element_bytes)
            if 3 * last.num_in == layer.mlp_elements:
                products += last.num_in * _fewer_bytes(adapters, [last], element_bytes)
            else:
                copies += last.num_in * _copies(adapters, [last])[0]
    return Float8Inputs(norms / shape.num_layers, products / shape.num_layers, copies / shape.num_layers)


def _fewer_bytes(adapters: Mapping[str, LoraConfig], linears: Sequence[Linear], element_bytes: int) -> int:
    """Return how many bytes fewer are saved of a value that these layers read; negative if more."""
    num_copies, is_kept = _copies(adapters, linears)
    return (0 if is_kept or num_copies == 0 else element_bytes) - num_copies


def _copies(adapters: Mapping[str, LoraConfig], linears: Sequence[Linear]) -> tuple[int, bool]:
    """Return how many groups of these layers save their input in float8, and whether another saves it as it is."""
    groups: dict[float, list[int]] = {}
    for adapter in (adapters[linear.name] for linear in linears if linear.name in adapters):
        # layers of one scaling are one group
        groups.setdefault(adapter.alpha / adapter.rank ** (0.5 if adapter.rslora else 1), []).append(adapter.rank)
    in_float8 = [
        len(ranks) <= FLOAT8_LAYERS and max(ranks) <= FLOAT8_RANK and sum(ranks) % FLOAT8_RANK_MULTIPLE == 0
        for ranks in groups.values()
    ]
    return sum(in_float8), not all(in_float8)
