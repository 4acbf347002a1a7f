"""Keys of a row, by which `data.dedupe` finds rows that repeat it: a hash of what is stored, and MinHash of its texts.

MinHash: Broder 1997, "On the resemblance and containment of documents"; of eight bits a hash: Li and Koenig 2010,
"b-Bit Minwise Hashing". A key depends on nothing but the row, so that every process makes the same one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.config.data import Dedupe
from flatout.data.conversation import Conversation, ParsedRow, PlainText, PreferenceRow, Sample, TokenRow
from flatout.data.encode import TokenizedText
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, Fix

Decode = Callable[..., str]
Hashes = NDArray[np.uint64]
EXACT_WORDS, SIGNATURE_WORDS = 2, 16
"""Words of a row's key: the hash of its content, and its signature for `near`."""
INDEXED_WORDS = 8
"""Words of a signature by which rows that may be alike are looked up."""
KEY_WORDS: Mapping[Dedupe, int] = {"off": 0, "exact": EXACT_WORDS, "near": EXACT_WORDS + SIGNATURE_WORDS}
"""Words of a key."""
# of 64 bytes for prompts, and for answers, so many are equal in near rows
_LEAST_EQUAL = 54
_SHINGLE_WORDS, _AT_ONCE = 3, 1 << 14
# characters of scripts that put no spaces between words are words: Thai to Lao, Burmese, Khmer, kana, ideographs
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+|[^\w\s]")


def prompt_keys(store: TokenStore) -> NDArray[np.int64]:
    """Return a number for each sample [N], equal where the tokens before the first answer are.

    A sample that begins with its answer, such as a document, has its own.
    """
    hashes, has_prompt = np.zeros(store.num_samples, np.uint64), np.zeros(store.num_samples, np.bool_)
    for index in range(store.num_samples):
        ids, loss_mask = store.sample(index).pair
        first = int(loss_mask.argmax())
        has_prompt[index], hashes[index] = first > 1, xxhash.xxh3_64_intdigest(ids[:first].tobytes())
    keys = np.unique(hashes, return_inverse=True)[1]
    return np.where(has_prompt, keys, len(keys) + np.arange(len(keys)))


def row_key(
    policy: Dedupe,
    sample: ParsedRow,
    pieces: Sequence[TokenizedText],
    loss_type: str = "response_only",
    decode: Decode | None = None,
) -> NDArray[np.uint64]:
    """Return a row's key: xxh3-128 of the ids and masks of its pieces, then, for `near`, a signature of its texts.

    With `decode`, for a row of which the pieces hold only a part, these texts are those of the pieces.
    """
    content = xxhash.xxh3_128(np.array([len(piece.token_ids) for piece in pieces], np.int64).tobytes())
    for piece in pieces:
        content.update(np.ascontiguousarray(piece.token_ids, np.int32).tobytes())
        content.update(piece.loss_mask.tobytes())
        content.update(b"".join(picture.digest for picture in piece.pictures))
    if policy == "near" and any(piece.pictures for piece in pieces):
        said = "data.dedupe=near compares texts, and equal texts ask about different pictures"
        raise DataError(said, [Fix({"data.dedupe": "exact"}, "compares pictures too")])
    if isinstance(sample, PreferenceRow):
        content.update(json.dumps([sample.units, sample.columns], sort_keys=True).encode())
    exact = np.frombuffer(content.digest(), np.uint64)
    if policy == "exact":
        return exact
    if isinstance(sample, PreferenceRow):
        return np.concatenate([exact, _signature(*_preference_sides(sample))])
    return np.concatenate([exact, _signature(*_sides(sample, pieces, loss_type, decode))])


def are_near(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return whether keys [..., words] are of near rows, bool [...].

    A byte of their signatures is equal with a probability of the Jaccard index of the shingles of prompts, or answers.
    """
    one_bytes, other_bytes = (np.ascontiguousarray(keys[..., EXACT_WORDS:]).view(np.uint8) for keys in (one, other))
    equal = one_bytes == other_bytes
    # a word has four bytes of prompts, and four of answers
    num_equal = equal.reshape(*equal.shape[:-1], equal.shape[-1] // 8, 2, 4).sum((-3, -1), dtype=np.int64)
    return np.asarray((num_equal >= _LEAST_EQUAL).all(-1))


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well spread bits (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


_CONSTANTS = mixed(np.arange(1, 260, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
# [prompt or answers, factor or summand, hash, 1]; factors are odd
_LINES = _CONSTANTS[:256].astype(np.uint32).reshape(2, 2, 64, 1) | np.array([1, 0], np.uint32).reshape(1, 2, 1, 1)
_COEFFICIENTS = _CONSTANTS[256:] | np.uint64(1)


def _signature(*words: Hashes) -> NDArray[np.uint64]:
    """Return MinHash bytes of hashed words: what comes without loss, and what is learnt; uint64 [SIGNATURE_WORDS].

    A word has four bytes of each, so that signatures meet in it with probability (J_prompt * J_answers)^4.
    """
    prompt, answers = map(_shingles, words)
    # where one side is empty, all bytes are of the other
    sides = (prompt if len(prompt) else answers, answers if len(answers) else prompt)
    least = np.full((2, 4 * SIGNATURE_WORDS), 0xFFFFFFFF, np.uint32)
    for side, (factor, summand), own in zip(sides, _LINES, least, strict=True):
        for start in range(0, len(side), _AT_ONCE):  # a document may have millions
            np.minimum(own, (side[start : start + _AT_ONCE] * factor + summand).min(1), out=own)
    # the highest byte of a product depends on all bytes of its factor
    signature = ((least * np.uint32(0x9E3779B1)) >> np.uint32(24)).astype(np.uint8)
    return signature.reshape(2, SIGNATURE_WORDS, 4).swapaxes(0, 1).reshape(SIGNATURE_WORDS, 8).view(np.uint64)[:, 0]


def _shingles(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return a hash of each three words in a row; of all words if there are fewer."""
    size = min(_SHINGLE_WORDS, len(words))
    if not size:
        return np.zeros(0, np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(words, size)
    return (mixed((windows * _COEFFICIENTS[:size]).sum(1, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)


def _preference_sides(row: PreferenceRow) -> list[Hashes]:
    """Return hashes of the words of the prompt, and of the answers, apart by their place or label."""
    sides = [_sides(answer, (), "response_only", None) for answer in row.answers]
    salts = [int(label) for label in row.columns.get("label", range(len(sides)))]
    answers = [words ^ np.uint64(salt) for (_, words), salt in zip(sides, salts, strict=True)]
    return [sides[0][0], np.concatenate(answers)]


def _sides(sample: Sample, pieces: Sequence[TokenizedText], loss_type: str, decode: Decode | None) -> list[Hashes]:
    """Return hashes of the words of a row without loss, and of those that are learnt; no system prompt's."""
    if decode is not None or isinstance(sample, TokenRow):
        ids = np.concatenate([piece.token_ids for piece in pieces])
        # the first token of a piece carries no loss, but belongs to what follows it
        learnt = np.concatenate([np.append(piece.loss_mask[1:2], piece.loss_mask[1:]) for piece in pieces])
        halves = [ids[~learnt], ids[learnt]]
        if decode is None or isinstance(sample, TokenRow):
            return [mixed(half.astype(np.uint64)) for half in halves]
        texts = [decode(half.tolist(), skip_special_tokens=True) for half in halves]
        messages = sample.messages if isinstance(sample, Conversation) else ()
        for system in (message.content.strip() for message in messages if message.role == "system"):
            texts[0] = texts[0].replace(system, " ")
        words = [_words(text) for text in texts]
    else:
        words = [[], []]
        for is_learnt, part in _parts(sample, loss_type == "all"):
            words[is_learnt] += part
    return [
        np.array([xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) for word in side], np.uint64)
        for side in words
    ]


def _parts(sample: Conversation | PlainText, learns_all: bool) -> Iterator[tuple[bool, list[str]]]:
    """Yield whether a part of a row carries loss, and its words."""
    if isinstance(sample, PlainText):
        yield learns_all, _words(sample.prompt)
        yield from _ranges(sample.text, () if learns_all else sample.silent, True)
        return
    for message in sample.messages:
        if message.role != "system":
            by_role = learns_all or message.role == "assistant"
            is_learnt = by_role if message.train is None else message.train
            # marks where a turn begins
            yield is_learnt, [f"\0{message.role}", *_words(message.reasoning or "")]
            yield from _ranges(message.content, message.silent, is_learnt)
            for call in message.tool_calls:
                yield is_learnt, _words(json.dumps([call.name, call.arguments], sort_keys=True, ensure_ascii=False))


def _ranges(text: str, silent: Sequence[tuple[int, int]], is_learnt: bool) -> Iterator[tuple[bool, list[str]]]:
    edges = [0, *chain.from_iterable(silent), len(text)]
    for place, (start, end) in enumerate(pairwise(edges)):
        yield is_learnt and place % 2 == 0, _words(text[start:end])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
