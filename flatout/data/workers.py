"""Tokenizes chunks of rows in one or several processes; results keep the order of the rows."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.columns import JUDGEMENTS
from flatout.data.conversation import Conversation, ParsedRow, PreferenceRow
from flatout.data.counts import NOTHING, Outcome, Size, Tally
from flatout.data.loss_mask.mask import MaskedText
from flatout.data.pictures.processor import Picture
from flatout.data.row_keys import row_key
from flatout.data.rows.formats.parser import RowParser
from flatout.data.rows.read import RawRow
from flatout.data.tokenize import SampleTokenizer, TokenizedSample, TokenizeOptions
from flatout.environment import set_environment
from flatout.errors import DataError, Fix, FlatoutError, ResourceError, first_line
from flatout.io.template_limits import TemplateLimitError

ROWS_PER_CHUNK = 256
_MAX_PROCS = 16
_SERIAL_CHUNKS = 8  # below this, starting processes costs more than it saves
_CHUNKS_AHEAD = 4  # chunks in flight per process, to bound memory
# imports from where this process does, whose script may have no `if __name__ == "__main__"`: it must not run again
_SERVING = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from flatout.data.workers import serve; serve()"

Problem = tuple[str, tuple[Fix, ...]]
"""The error of a bad row without its traceback, which would hold a chunk of rows: its text, and what mends it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one source, as read or parsed; `copies[i]` is how often row i goes into the store.

    `problems` are the errors of rows that could not be read, before or between these.
    """

    parser: RowParser
    rows: tuple[RawRow | ParsedRow, ...]
    copies: NDArray[np.int32]
    problems: tuple[Problem, ...] = ()

    def parse(self, row: RawRow | ParsedRow) -> ParsedRow:
        """Return the common form of one of its rows. Raises DataError."""
        return self.parser.parse(row) if isinstance(row, RawRow) else row


@dataclass(frozen=True, slots=True)
class TokenizedChunk:
    """The samples of a chunk, flat, and what happened to its rows."""

    tally: Tally
    """What happened to its rows."""
    problems: list[Problem]
    """The errors of bad rows."""
    token_ids: NDArray[np.int32]
    """Of all samples, one after the other."""
    loss_mask: NDArray[np.bool_]
    """Whether each token carries loss."""
    lengths: NDArray[np.int64]
    """Tokens of each sample."""
    sample_row: NDArray[np.int64]
    """The row in the chunk that each sample is from."""
    unit_sizes: NDArray[np.int64]
    """Samples of each unit, which is of one row."""
    columns: Mapping[str, NDArray[Any]]
    """The values of each column of JUDGEMENTS: one for each of its units, samples or tokens."""
    pictures: Sequence[tuple[Picture, ...]] = ()
    """The pictures of each sample; () if none has any."""
    keys: Sequence[int] = ()
    """With `data.dedupe`, what is equal for rows of one content: one for each row, 0 for a row without samples."""
    outcomes: Sequence[Outcome] = ()
    """With `data.dedupe`, what happened to each row."""
    repeated: Size = NOTHING
    """The samples of rows that repeat an earlier one, which are left out."""

    def of_rows(self, is_taken: NDArray[np.bool_]) -> TokenizedChunk:
        """Return the samples of these rows (rows,) alone, with their units and columns; the rest stays as it is."""
        samples = is_taken[self.sample_row]
        units, tokens = samples[np.cumsum(self.unit_sizes) - self.unit_sizes], np.repeat(samples, self.lengths)
        per = {"unit": units, "sample": samples, "token": tokens}
        return replace(
            self,
            token_ids=self.token_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            lengths=self.lengths[samples],
            sample_row=self.sample_row[samples],
            unit_sizes=self.unit_sizes[units],
            columns={name: values[per[JUDGEMENTS[name].per]] for name, values in self.columns.items()},
            pictures=[own for own, is_kept in zip(self.pictures, samples, strict=False) if is_kept],
        )


def usable_procs(wanted: int | None) -> int:
    """Return the number of tokenizing processes: one per usable core up to 16, or `wanted` up to 16 or the cores."""
    num_cores = len(os.sched_getaffinity(0))
    return min(num_cores, _MAX_PROCS) if wanted is None else min(wanted, max(num_cores, _MAX_PROCS))


def tokenize_chunks(
    chunks: Iterable[Chunk], tokenizer: SampleTokenizer, num_procs: int | None
) -> Iterator[tuple[Chunk, TokenizedChunk]]:
    """Yield each chunk with its tokens, in order, for any number of processes.

    With `num_procs` None, as many as are useful. Raises DataError for problems of the whole set (no template),
    ResourceError with the range of rows if a process died.
    """
    stream, most_serial, wanted = iter(chunks), 1 if num_procs else _SERIAL_CHUNKS, usable_procs(num_procs)
    head = list(islice(stream, most_serial + 1))
    if wanted > 1 and len(head) > most_serial:
        yield from _in_processes(chain(head, stream), tokenizer.options, wanted)
    else:
        for chunk in chain(head, stream):
            yield chunk, _tokenized(chunk, tokenizer)


def tokenize_chunk(chunk: Chunk, tokenizer: SampleTokenizer) -> TokenizedChunk:
    """Parse and tokenize the rows of one chunk; bad rows become `problems`."""
    outcomes, problems = [Outcome("bad") for _ in chunk.rows], dict[int, Problem]()
    done, keys = dict[int, TokenizedSample](), [0] * len(chunk.rows)
    # in turns of one kind of work: what parsing, rendering and encoding look up stays in the processor's cache
    samples: list[tuple[int, ParsedRow, Sequence[MaskedText]]] = []
    for index, row in enumerate(chunk.rows):
        try:
            sample = chunk.parse(row)
        except DataError as error:
            problems[index] = error.text, error.fixes
            continue
        first = sample.answers[0] if isinstance(sample, PreferenceRow) else sample
        if isinstance(first, Conversation):
            outcomes[index].noticed["conversations"] = 1
            if not tokenizer.continues(first):
                _ = tokenizer.masker  # raises here if there is no template: an error of the whole set
        try:
            samples.append((index, sample, tokenizer.masked(sample)))
        except TemplateLimitError:
            raise  # the next row would fail too, after as long
        except DataError as error:
            problems[index] = error.text, error.fixes
    tokenizer.encoder.encode_ahead([text.text for _, _, texts in samples for text in texts])
    for index, sample, texts in samples:
        try:
            done[index] = result = tokenizer(sample, texts)
        except DataError as error:
            problems[index] = error.text, error.fixes
            continue
        result.outcome.noticed.update(outcomes[index].noticed)
        outcomes[index] = result.outcome
        if tokenizer.options.settings.dedupe != "off" and result.pieces:
            keys[index] = row_key(sample, result.pieces)
    pieces = [piece for result in done.values() for piece in result.pieces]
    return TokenizedChunk(
        Tally.of(outcomes),
        [problems[index] for index in sorted(problems)],
        np.concatenate([np.zeros(0, np.int32), *(piece.token_ids for piece in pieces)]),
        np.concatenate([np.zeros(0, np.bool_), *(piece.loss_mask for piece in pieces)]),
        np.array([len(piece.token_ids) for piece in pieces], np.int64),
        np.repeat(np.array([*done], np.int64), [len(result.pieces) for result in done.values()]),
        np.array([size for result in done.values() for size in result.unit_sizes], np.int64),
        {
            name: np.array([value for result in done.values() for value in result.columns[name]], column.stored)
            for name, column in JUDGEMENTS.items()
            if name in chunk.parser.columns
        },
        [piece.pictures for piece in pieces] if any(piece.pictures for piece in pieces) else (),
        *((keys, outcomes) if tokenizer.options.settings.dedupe != "off" else ()),
    )


def serve() -> None:
    """Load the tokenizer once, and fork a process with it for each further end of a pipe; answer at the first.

    The command line has the file descriptors of the ends; the options come through the first. Each process ends when
    the parent closes its pipe or dies.
    """
    set_environment({"TOKENIZERS_PARALLELISM": "false"})  # with no thread, nothing holds a lock when it forks
    ends = [Connection(int(fd)) for fd in sys.argv[2:]]
    tokenizer, own, forked = SampleTokenizer(ends[0].recv()), ends[0], list[int]()
    gc.freeze()  # or the first collection copies what is shared
    for end in ends[1:]:
        forked.append(os.fork())
        if not forked[-1]:
            own = end
            break
    for end in ends:  # a pipe shows that a process died only if no other process holds its end
        if end is not own:
            end.close()
    with suppress(EOFError, OSError):
        while True:
            own.send(_answer(own.recv(), tokenizer))
    if own is not ends[0]:
        os._exit(0)  # what the first one does at its end is not for its copies
    for pid in forked:
        os.waitpid(pid, 0)


def _named(chunk: Chunk) -> str:
    return f"rows {chunk.rows[0].origin} to {chunk.rows[-1].origin}" if chunk.rows else "the last rows"


def _tokenized(chunk: Chunk, tokenizer: SampleTokenizer) -> TokenizedChunk:
    """Tokenize a chunk. A panic of a library, which is no Exception, becomes a DataError with its rows."""
    try:
        return tokenize_chunk(chunk, tokenizer)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise _broken(chunk, error) from error


def _broken(chunk: Chunk, error: BaseException) -> DataError:
    said = f"{type(error).__name__}: {first_line(error)}"
    return DataError(f"{_named(chunk)}: a row there cannot be tokenized ({said}); find it by halves, and remove it")


def _answer(chunk: Chunk, tokenizer: SampleTokenizer) -> TokenizedChunk | Exception:
    try:
        return _tokenized(chunk, tokenizer)
    except Exception as error:  # noqa: BLE001  (the parent raises it)
        if not isinstance(error, FlatoutError):
            error.add_note(traceback.format_exc())
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # noqa: BLE001  (whatever its class does)
            return _broken(chunk, error)
        return error


@dataclass(frozen=True, slots=True)
class _Worker:
    """The parent's end of a pipe to a process, which gets its next chunk while it works on one."""

    end: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)
    receiving: threading.Lock = field(default_factory=threading.Lock)

    def work(self, chunk: Chunk) -> TokenizedChunk:
        """Have a chunk tokenized. Raises what that raises, and ResourceError with its rows if the process died."""
        try:
            with ExitStack() as until_answered:
                with self.sending:
                    self.end.send(chunk)
                    until_answered.enter_context(self.receiving)  # answers come in the order of the chunks
                answer: TokenizedChunk | Exception = self.end.recv()
        except (EOFError, OSError) as error:
            raise ResourceError(
                f"a tokenizer process died (killed, or out of memory) in {_named(chunk)}; look for a huge row there",
                [Fix({"data.num_procs": 1}, "needs the least memory")],
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _in_processes(
    chunks: Iterator[Chunk], options: TokenizeOptions, num_procs: int
) -> Iterator[tuple[Chunk, TokenizedChunk]]:
    # a new process: forking this one with its threads (torch, tokenizers, the console's) can deadlock; it ends with
    # this one's group, but Ctrl-C, which it inherits as blocked, is for this one
    pipes = [Pipe() for _ in range(num_procs)]
    fds = [theirs.fileno() for _, theirs in pipes]
    command = [sys.executable, "-P", "-c", _SERVING, json.dumps(sys.path), *map(str, fds)]
    pool, workers = ThreadPoolExecutor(num_procs * _CHUNKS_AHEAD), cycle([_Worker(ours) for ours, _ in pipes])
    waiting: deque[tuple[Chunk, Future[TokenizedChunk]]] = deque()

    first = None
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            first = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for _, theirs in pipes:
            theirs.close()
        with suppress(OSError):  # it died; its first chunk says so
            pipes[0][0].send(options)
        for chunk in chunks:
            waiting.append((chunk, pool.submit(next(workers).work, chunk)))
            if len(waiting) >= num_procs * _CHUNKS_AHEAD:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for ours, _ in pipes:
            ours.close()
        if first is not None:
            first.wait()
