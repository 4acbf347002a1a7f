"""KL pairs: each prompt of a data set with the answer to another one, from which KTO estimates a KL divergence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from flatout.config.objective import REFERENCE
from flatout.data.reference_column import with_reference
from flatout.data.token_store import TokenSample, TokenStore
from flatout.errors import DataError

# tokens that are read at a time, with six numbers of 8 bytes each
_CHUNK_TOKENS = 1 << 20
# how many other answers are tried for one of another prompt
_TRIES = 64
# of the splitmix64 finalizer, as in planner/steps/order.py
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class KLStore(TokenStore):
    """Prompts of a store, each with the answer to another one; only `sample` reads tokens."""

    base: TokenStore
    """The samples that prompts and answers are from."""
    answer_of: NDArray[np.int64]
    """The sample of which each prompt gets the tokens from the first label on, (N,)."""
    prompt_tokens: NDArray[np.int64]
    """Tokens of each sample of `base` before its first label, (N,)."""

    def sample(self, index: int, columns: object = ()) -> TokenSample:
        """Return a prompt with the answer to another one; there are no columns per token."""
        other = int(self.answer_of[index])
        own, answer = self.base.sample(index), self.base.sample(other)
        first, start = int(self.prompt_tokens[index]), int(self.prompt_tokens[other])
        stop = start + int(self.offsets[index + 1] - self.offsets[index]) - first
        return TokenSample(
            np.concatenate([own.token_ids[:first], answer.token_ids[start:stop]]),
            np.concatenate([own.loss_mask[:first], answer.loss_mask[start:stop]]),
        )


def make_kl_store(store: TokenStore) -> KLStore:
    """Return as many samples, each the prompt of one followed by the answer to another prompt.

    Which answer is fixed by the data set alone, so that a reference's log-probabilities serve every run. An answer
    after which a sample would be longer than the longest one is cut. Raises DataError for a single sample, and for one
    without labels.
    """
    count, lengths = store.num_samples, store.lengths
    if count < 2:
        raise DataError(f"{store.folder}: one row, but this objective compares it with the answer to another; add rows")
    prompt_tokens, marks = _read_prompts(store)
    answer_of = _answers_of_others(marks)
    answer_tokens = np.minimum(lengths[answer_of] - prompt_tokens[answer_of], lengths.max() - prompt_tokens)
    num_label_tokens = store.num_label_tokens[answer_of]
    for index in np.flatnonzero(answer_tokens < lengths[answer_of] - prompt_tokens[answer_of]).tolist():
        other = int(answer_of[index])
        start = int(store.offsets[other] + prompt_tokens[other])
        num_label_tokens[index] = np.count_nonzero(store.loss_mask[start : start + int(answer_tokens[index])])
    mark = xxh3_128_hexdigest(answer_of.tobytes() + answer_tokens.tobytes())
    blank, offsets = with_reference(store), np.append(0, np.cumsum(prompt_tokens + answer_tokens))
    columns = {
        name: replace(column, fingerprint=xxh3_128_hexdigest(f"{column.fingerprint} {mark}".encode()))
        for name, column in store.columns.items()
    }
    return KLStore(
        store.folder, store.token_ids, store.loss_mask, offsets, num_label_tokens,
        store.hashes, store.files, store.rows, replace(store.meta, name=f"{store.meta.name}, answers to other prompts"),
        columns={**columns, REFERENCE: blank.columns[REFERENCE]}, extra={REFERENCE: blank.extra[REFERENCE]},
        base=store, answer_of=answer_of, prompt_tokens=prompt_tokens,
    )  # fmt: skip


def _read_prompts(store: TokenStore) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the number of tokens before the first label of each sample, and a number that equal prompts share."""
    prompt_tokens, marks = np.empty(store.num_samples, np.int64), np.empty(store.num_samples, np.uint64)
    last = 0
    while (first := last) < store.num_samples:
        last = max(first + 1, int(np.searchsorted(store.offsets, store.offsets[first] + _CHUNK_TOKENS, "right")) - 1)
        bounds = store.offsets[first : last + 1]
        labels = np.append(np.flatnonzero(store.loss_mask[int(bounds[0]) : int(bounds[-1])]) + bounds[0], bounds[-1])
        starts = labels[np.searchsorted(labels, bounds[:-1])]
        if (empty := np.flatnonzero(starts >= bounds[1:])).size:
            raise DataError(f"{store.origin(first + int(empty[0]))}: the answer has no label token")
        own = slice(first, last)
        prompt_tokens[own] = starts - bounds[:-1]
        places = np.arange(bounds[0], bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        hashed = _mixed(store.token_ids[int(bounds[0]) : int(bounds[-1])]) * (2 * places + 1).astype(np.uint64)
        hashed[places >= np.repeat(prompt_tokens[own], np.diff(bounds))] = 0
        marks[own] = np.add.reduceat(hashed, bounds[:-1] - bounds[0])
    return prompt_tokens, marks


def _mixed(values: NDArray[np.integer]) -> NDArray[np.uint64]:
    mixed = (values.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    return np.asarray(mixed ^ mixed >> np.uint64(29)) * _MULTIPLIER


def _answers_of_others(marks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each sample one that follows it in a fixed random cycle: if there is one near, of another prompt."""
    order, answer_of = np.argsort(_mixed(np.arange(len(marks))), kind="stable"), np.arange(len(marks))
    for shift in (*range(1, min(_TRIES, len(marks))), 1):
        if not (same := marks[answer_of[order]] == marks[order]).any():
            break
        answer_of[order[same]] = np.roll(order, -shift)[same]
    return answer_of
