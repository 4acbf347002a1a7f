"""The longest sample that each card can train, by model and method, from the planner: the tables of the documentation.

    python benchmarks/memory_table.py

Each figure is the line `longest document` of `flatout plan run.yaml --device CARD`, with the settings that the row and
the column name. No GPU and no weights are needed: sizes follow from config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from bench.shapes import SHAPES

from flatout.config.schema import Config
from flatout.planner.devices import DEVICES
from flatout.planner.memory.budget import longest_document_tokens
from flatout.planner.parallel_layout import SINGLE_RANK, resolve_layout
from flatout.planner.settings import PlanSettings
from flatout.planner.shape import ModelShape
from flatout.trainer.model_shape import make_shape

MODELS = {
    "Qwen3-0.6B": "qwen3-0.6b", "Qwen3-1.7B": "qwen3-1.7b", "Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b",
    "Llama-3.1-8B": "llama-3.1-8b", "Qwen3-14B": "qwen3-14b", "Qwen3-32B": "qwen3-32b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b", "Llama-3.3-70B": "llama-70b",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "QLoRA": {"base": {"storage": "nf4"}},
    "LoRA": {},
    "full, 8-bit": {"method": "full", "full": {"weights": "bf16"}, "optim": {"name": "adamw8bit"}},
    "full, 8-bit, update in backward": {
        "method": "full",
        "full": {"weights": "bf16", "update": "backward"},
        "optim": {"name": "adamw8bit", "max_grad_norm": None},
    },
    "full": {"method": "full"},
}


class Card(NamedTuple):
    """A card to plan for; `memory` is the setting of that name, and `ranks` how many such cards share the state."""

    device: str
    memory: int | str = "auto"
    ranks: int = 1


CARDS = {
    "8 GB": Card("4090", 7), "12 GB": Card("4090", 11), "16 GB": Card("4090", 15), "24 GB": Card("4090"),
    "48 GB": Card("l40s"), "80 GB": Card("h100"), "141 GB": Card("h200"),
}  # fmt: skip
SHARDED = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.3-70B")
SEVERAL = {f"{ranks} x 80 GB": Card("h100", ranks=ranks) for ranks in (2, 4, 8)}
# shorter samples than these are of no use
LEAST_TOKENS = 512


def main() -> None:
    """Print both tables as Markdown."""
    print("\n".join(table(MODELS, METHODS, CARDS)))
    print()
    print("\n".join(table(SHARDED, ("LoRA", "full, 8-bit", "full"), SEVERAL)))


def table(models: Iterable[str], methods: Iterable[str], cards: Mapping[str, Card]) -> Iterator[str]:
    """Yield the lines of a table; a line without a card that can train is left out."""
    yield f"| model | method | {' | '.join(cards)} |"
    yield "|---" * (2 + len(cards)) + "|"
    for model in models:
        for method in methods:
            cells = [cell(model, method, card) for card in cards.values()]
            if set(cells) != {""}:
                yield f"| {model} | {method} | {' | '.join(cells)} |"


def cell(model: str, method: str, card: Card) -> str:
    """Return the tokens in words: `all` for the model's own limit, and nothing where the card cannot train."""
    tokens = longest(model, method, card)
    if tokens >= SHAPES[MODELS[model]]["max_position_embeddings"]:
        return "all"
    return "" if tokens < LEAST_TOKENS else f"{tokens // 100 / 10:g}k" if tokens < 10_000 else f"{tokens // 1000}k"


def longest(model: str, method: str, card: Card) -> int:
    """Return the tokens of the longest sample, alone in a micro-batch, all of whose tokens carry loss."""
    values = {"model": {"name": model}, "data": {"sources": [{"path": "chats.jsonl"}]}, "memory": card.memory}
    settings = PlanSettings.of(Config.model_validate({**values, **METHODS[method]}))
    layout = (
        SINGLE_RANK if card.ranks == 1 else resolve_layout(settings, "fsdp", num_ranks=card.ranks, num_nodes=1, why="")
    )
    return longest_document_tokens(settings, shape_of(model), DEVICES[card.device], 1.0, layout)


@cache
def shape_of(model: str) -> ModelShape:
    """Return the sizes of one of `MODELS`."""
    return make_shape(SHAPES[MODELS[model]])


if __name__ == "__main__":
    main()
