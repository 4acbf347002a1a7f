"""What layers save of their inputs where adapters read float8 (see `flatout.models.lora.fused`)."""

from __future__ import annotations

from typing import NamedTuple

from flatout.config.schema import LoraConfig
from flatout.planner.memory.constants import FLOAT8_LAYERS, FLOAT8_RANK, FLOAT8_RANK_MULTIPLE
from flatout.planner.shape import Linear, ModelShape


class Float8Inputs(NamedTuple):
    """Bytes per token and layer: `norms` and `products` fewer of norms' outputs and MLPs' products, `beside` more."""

    norms: float = 0.0
    products: float = 0.0
    beside: float = 0.0


def float8_inputs(shape: ModelShape, lora: LoraConfig, element_bytes: int) -> Float8Inputs:
    """Return how the bytes change that layers save, if their products are in float8.

    Within a module, the last linear layer is taken to read what the module computed, all others what the module got.
    Attention saves its output anyway, and a float8 copy of it comes beside that.
    """
    targets, norms, products, beside = shape.targeted(lora), 0, 0, 0
    for index, layer in enumerate(shape.layers):
        modules: dict[str, list[Linear]] = {}
        for linear in layer.linears:
            modules.setdefault(linear.name.rpartition(".")[0], []).append(linear)

        def adapters(linears: list[Linear], index: int = index) -> list[tuple[Linear, LoraConfig]]:
            names = [f"{shape.layers_path}.{index}.{linear.name}" for linear in linears]
            pairs = zip(linears, names, strict=True)
            return [(linear, lora.of_layer(name)) for linear, name in pairs if name in targets]

        for *readers, last in modules.values():
            norms += _fewer_bytes(adapters(readers), element_bytes)
            if 3 * last.num_in == layer.mlp_elements:
                products += _fewer_bytes(adapters([last]), element_bytes)
            else:
                beside += last.num_in * _copies(adapters([last]))[0]
    return Float8Inputs(norms / shape.num_layers, products / shape.num_layers, beside / shape.num_layers)


def _fewer_bytes(adapters: list[tuple[Linear, LoraConfig]], element_bytes: int) -> int:
    """Return how many bytes per token fewer are saved of these layers' input; negative if more."""
    num_copies, is_kept = _copies(adapters)
    if num_copies == 0:
        return 0
    return adapters[0][0].num_in * ((0 if is_kept else element_bytes) - num_copies)


def _copies(adapters: list[tuple[Linear, LoraConfig]]) -> tuple[int, bool]:
    """Return how many groups of these layers save their input in float8, and whether another saves it as it is."""
    groups: dict[float, list[int]] = {}
    for _, own in adapters:
        # layers of one scaling are one group
        groups.setdefault(own.alpha / own.rank ** (0.5 if own.rslora else 1), []).append(own.rank)
    in_float8 = [
        len(ranks) <= FLOAT8_LAYERS and max(ranks) <= FLOAT8_RANK and sum(ranks) % FLOAT8_RANK_MULTIPLE == 0
        for ranks in groups.values()
    ]
    return sum(in_float8), not all(in_float8)
