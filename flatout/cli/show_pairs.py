"""Prints the two answers of a pair side by side."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from flatout.data.columns import PREFIX_TOKENS
from flatout.data.preference_columns import first_difference
from flatout.data.token_store import TokenStore
from flatout.io.redact import printable

WIDTH = 80
_COLUMN = (WIDTH - 3) // 2
Decode = Callable[[list[int]], str]


def print_pair(console: Console, store: TokenStore, unit: int, decode: Decode) -> None:
    """Print what a pair begins with, then the rest of both answers in two columns; tokens with loss are in color."""
    common = int(store.extra[PREFIX_TOKENS][unit])
    margin = f", margin {float(store.extra['margin'][unit]):g}" if "margin" in store.extra else ""
    parts = f"diverge at token {first_difference(store, unit) + 1}"
    console.print(f"--- Pair {unit + 1} ({store.origin(2 * unit)}, {parts}{margin}) ---")
    samples = [store.sample(2 * unit + place) for place in (0, 1)]
    prompt = Text(printable(decode(samples[0].token_ids[:common].tolist())), style="dim")
    console.print(prompt.wrap(console, WIDTH, overflow="fold"))
    columns = []
    for name, sample in zip(("chosen", "rejected"), samples, strict=True):
        sizes = f"{len(sample.token_ids)} tokens, {int(sample.loss_mask.sum())} with loss"
        text = Text(f"{name}: {sizes}\n") + colored(sample.token_ids[common:], sample.loss_mask[common:], decode)
        columns.append(list(text.wrap(console, _COLUMN, overflow="fold")))
    for left, right in zip_longest(*columns, fillvalue=Text()):
        padded = left.copy()
        padded.pad_right(_COLUMN - left.cell_len)
        console.print(Text.assemble(padded, " \N{BOX DRAWINGS LIGHT VERTICAL} ", right))
    console.print()


def colored(token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], decode: Decode) -> Text:
    """Return tokens as text: those with loss in color."""
    text = Text()
    for run in np.split(np.arange(len(token_ids)), np.flatnonzero(np.diff(loss_mask)) + 1):
        style = "bold green" if loss_mask[run[0]] else "dim"
        text.append(printable(decode(token_ids[run].tolist())), style=style)
    return text
