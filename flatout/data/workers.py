"""Tokenising chunks of rows, in this process or in several; the results come in the order of the rows."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from flatout.data.conversation import Conversation, Origin
from flatout.data.formats import RowParser
from flatout.data.rows import RawRow
from flatout.data.tokenize import SampleTokenizer, TokenizedSample, TokenizeOptions
from flatout.errors import DataError, ResourceError

ROWS_PER_CHUNK = 256
_MAX_PROCS = 16
_SERIAL_CHUNKS = 8  # below this, starting processes costs more than it saves
_CHUNKS_AHEAD = 4  # chunks in flight for each process: bounds memory


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one source; `copies[i]` is how often row i goes into the store."""

    parser: RowParser
    rows: tuple[RawRow, ...]
    copies: NDArray[np.int32]


@dataclass(slots=True)
class TokenizedChunk:
    """The pieces of a chunk, flat. `num_tokens[i]` is the length of row i before the length policy (0: a bad row).

    `piece_row[p]` is the row (in the chunk) of piece p; `fates[i]` what became of row i; `problems` its bad rows.
    """

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    piece_row: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    fates: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    typed_rows: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def default_num_procs() -> int:
    """One process a usable core, 16 at most."""
    return min(len(os.sched_getaffinity(0)), _MAX_PROCS)


def tokenize_chunks(
    chunks: Iterable[Chunk], tokenizer: SampleTokenizer, num_procs: int | None
) -> Iterator[tuple[Chunk, TokenizedChunk]]:
    """Each chunk with its tokens, in order, whatever the number of processes.

    `num_procs` None: as many as useful. Raises DataError for what concerns the whole set (no template), ResourceError
    with the range of rows when a process died.
    """
    stream = iter(chunks)
    head = list(islice(stream, 1 if num_procs else _SERIAL_CHUNKS))
    wanted = num_procs or default_num_procs()
    following = next(stream, None)
    if wanted == 1 or following is None:
        rest = [] if following is None else [following]
        for chunk in chain(head, rest, stream):
            yield chunk, tokenize_chunk(chunk, tokenizer)
        return
    yield from _in_processes(chain(head, [following], stream), tokenizer.options, wanted)


def tokenize_chunk(chunk: Chunk, tokenizer: SampleTokenizer) -> TokenizedChunk:
    """Parse and tokenise the rows of one chunk; bad rows become `problems`."""
    results: list[TokenizedSample | None] = []
    done = TokenizedChunk(*_flat([]), num_tokens=np.zeros(len(chunk.rows), np.int64), fates=[])
    for index, raw in enumerate(chunk.rows):
        try:
            sample = chunk.parser.parse(raw)
        except DataError as error:
            done.problems.append(str(error))
            results.append(None)
            continue
        if isinstance(sample, Conversation):
            done.counts["conversations"] += 1
            _ = tokenizer.masker  # no template: an error of the whole set, not of this row
        try:
            result = tokenizer(sample)
        except DataError as error:
            done.problems.append(str(error))
            results.append(None)
            continue
        results.append(result)
        done.num_tokens[index] = result.num_tokens
        done.counts["typed_control_tokens"] += result.num_typed_control
        done.counts["reasoning_dropped"] += result.num_reasoning_dropped
        done.counts["windows_without_labels"] += result.num_windows_dropped
        if result.num_typed_control:
            done.typed_rows.append(index)
    done.fates = ["bad" if result is None else result.fate for result in results]
    done.token_ids, done.trained, done.lengths, done.piece_row = _flat(results)
    return done


def _flat(
    results: list[TokenizedSample | None],
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    pieces = [(index, piece) for index, result in enumerate(results) if result for piece in result.rows]
    ids = [piece.token_ids for _, piece in pieces] or [np.zeros(0, np.int32)]
    trained = [piece.trained for _, piece in pieces] or [np.zeros(0, np.bool_)]
    lengths = np.array([len(piece.token_ids) for _, piece in pieces], dtype=np.int64)
    return np.concatenate(ids), np.concatenate(trained), lengths, np.array([index for index, _ in pieces], np.int64)


@lru_cache(maxsize=1)
def _own_tokenizer(options: TokenizeOptions) -> SampleTokenizer:
    """The one tokenizer of a worker process."""
    return SampleTokenizer(options)


def _work(chunk: Chunk, options: TokenizeOptions) -> TokenizedChunk:
    return tokenize_chunk(chunk, _own_tokenizer(options))


def _in_processes(
    chunks: Iterator[Chunk], options: TokenizeOptions, num_procs: int
) -> Iterator[tuple[Chunk, TokenizedChunk]]:
    # spawn: forking a process that has threads (torch, tokenizers) can deadlock
    pool = ProcessPoolExecutor(num_procs, mp_context=multiprocessing.get_context("spawn"))
    waiting: deque[tuple[Chunk, Future[TokenizedChunk]]] = deque()
    chunk: Chunk | None = None
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_work, chunk, options)))
            if len(waiting) >= num_procs * _CHUNKS_AHEAD:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool as error:
        first = waiting[0][0] if waiting else chunk
        between = _between(first.rows[0].origin, chunk.rows[-1].origin) if first and chunk else "before the first"
        raise ResourceError(
            f"a tokenising process died (killed, or out of memory) in rows {between}; "
            "set data.num_procs lower, or look for a huge row there"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _between(first: Origin, last: Origin) -> str:
    return f"{first} to {last.row if last.source == first.source else last}"
