"""What is measured: random token ids of typical lengths in a registered token store, and a tokenizer for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from flatout.data import registry
from flatout.data.store_writer import new_store
from flatout.data.token_store import StoreMeta, TokenStore
from flatout.data.tokenizer import load_tokenizer, tokenizer_digest
from flatout.demo.write import train_tokenizer

NAME = "bench"
# random ids stay within the tokenizer's vocabulary, since some trainers decode them; ids up to 3 are special
MIN_ID, MAX_ID = 4, 1000
LABEL_SHARE = 0.6

Samples = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]
"""Token ids [T] and loss mask [T] of all samples in a row, and the samples' lengths [N]."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal sample lengths in tokens, clipped to `min_tokens..max_tokens`.

    They come in groups of `samples_per_group`, each with its own seed.
    """

    samples_per_group: int
    mean_log: float
    sigma_log: float
    min_tokens: int
    max_tokens: int

    def group(self, index: int) -> list[int]:
        """Return the lengths of one group, seeded by `index`."""
        generator = torch.Generator().manual_seed(index)
        draws = torch.randn(self.samples_per_group, generator=generator) * self.sigma_log + self.mean_log
        lengths: list[int] = draws.exp().clamp(self.min_tokens, self.max_tokens).long().tolist()
        return lengths


CHAT = Lengths(32, 6.0, 0.8, 32, 2048)
REASONING = Lengths(8, 8.2, 0.7, 256, 16384)
# what people train on one small GPU: means of about 960 and 5,200 tokens
UP_TO_2K = Lengths(16, 6.85, 0.7, 64, 2048)
UP_TO_8K = Lengths(8, 8.5, 0.5, 512, 8192)


def random_samples(num_groups: int, vocab_size: int, lengths: Lengths = CHAT, max_tokens: int | None = None) -> Samples:
    """Return random ids of these lengths, at most `max_tokens` each; the last 60 % of each sample carry loss."""
    longest = max_tokens or lengths.max_tokens
    num_tokens = np.array([min(n, longest) for group in range(num_groups) for n in lengths.group(group)], np.int64)
    size, generator = (int(num_tokens.sum()),), torch.Generator().manual_seed(0)
    ids = torch.randint(MIN_ID, min(MAX_ID, vocab_size), size, generator=generator)
    masks = [np.arange(n) >= int(n * (1 - LABEL_SHARE)) for n in num_tokens]
    return ids.numpy().astype(np.int32), np.concatenate(masks), num_tokens


def digest(token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> str:
    """Return xxh3 of all ids and mask bits in training order: equal digests mean equal work."""
    return xxhash.xxh3_64_hexdigest(
        np.ascontiguousarray(token_ids, np.int32).tobytes() + np.ascontiguousarray(loss_mask, np.bool_).tobytes()
    )


def write_store(root: Path, tokenizer: str, vocab_size: int, samples: Samples, unit_size: int = 1) -> TokenStore:
    """Write the samples as the data set NAME of this root, as `flatout data build` would; so many make a unit."""
    token_ids, loss_mask, lengths = samples
    count, units = len(lengths), np.full(len(lengths) // unit_size, unit_size)
    meta = StoreMeta(
        name=NAME,
        fingerprint=digest(token_ids, loss_mask).ljust(32, "0"),
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(load_tokenizer(tokenizer)),
        template="",
        template_text="",
        settings={"loss_type": "response_only", "max_tokens": int(lengths.max())},
        vocabulary_size=vocab_size,
        files=(NAME,),
        counts={"rows": count},
        max_token_id=int(token_ids.max()),
    )
    with new_store(folder := registry.built_dir(root, NAME), vocab_size) as writer:
        writer.append(token_ids, loss_mask, lengths, np.zeros(count, np.int32), np.arange(1, count + 1), units)
        writer.finish(meta, {"counts": meta.counts})
    entry = registry.Entry(
        name=NAME,
        path=str(folder.relative_to(root)),
        sources=(NAME,),
        num_samples=count,
        tokenizer=tokenizer,
        template=None,
        loss_type="response_only",
        fingerprint=meta.fingerprint,
        created="",
    )
    registry.upsert(root, entry)
    return TokenStore.open(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a small but real BPE tokenizer with a chat template, since trainers read its special tokens."""
    train_tokenizer(Path(__file__).read_text(encoding="utf-8").splitlines(), MAX_ID).save_pretrained(str(folder))
