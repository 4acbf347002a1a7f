"""Scores answers: by functions in child processes, started again after a hang or crash, and by reward models."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, groupby
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.config.own_code import OwnCode
from flatout.config.rewards import RewardConfig
from flatout.data.prompts import RunPrompt
from flatout.data.rows.converter import files_of
from flatout.data.workers import usable_procs
from flatout.environment import environment_of_child
from flatout.errors import Fix, UsageError
from flatout.io.bounded_wait import to_stderr
from flatout.io.gpu_driver import VISIBLE
from flatout.io.own_files import kill_group, start_python
from flatout.io.redact import printable
from flatout.rollout.rewards.child import COMMAND, FILE_ENCODING
from flatout.rollout.rewards.model import RewardModel
from flatout.rollout.rewards.ready import READY_REWARDS

# for a file that is imported; beyond a call's own limit, where the child itself ends the call at that
LOAD_S, GRACE_S = 300.0, 2.0
POLL_S, END_S = 0.5, 2.0
MAX_REPLY_BYTES, MAX_LOG_BYTES = 16 << 20, 64 << 20
# calls of an async function that wait at the same time in one process
CALLS_TOGETHER = 32


Calls: TypeAlias = tuple[tuple[int, ...], ...]
"""The answers of each call."""
_Request: TypeAlias = tuple[int, Calls]
"""A reward, and its calls."""


class Item(NamedTuple):
    """An answer to score. The answers to one prompt stand one after the other."""

    prompt: RunPrompt
    answer: str
    """Without the stop token."""
    token_ids: Sequence[int]
    """Of the answer, a stop token included."""


class Scores:
    """What the functions say of answers."""

    values: NDArray[np.float64]
    """(answers, functions), in the order of both; NaN: not scored."""
    problems: Counter[str]
    """By function: how many answers it failed on."""

    def __init__(self, items: Sequence[Item], configs: Sequence[RewardConfig], log: Callable[[str], None]) -> None:
        self.values, self.problems = np.full((len(items), len(configs)), np.nan), Counter()
        self._items, self._configs, self._log = items, configs, log
        self._num_left = np.full(len(items), len(configs))

    @property
    def total(self) -> NDArray[np.float64]:
        """(answers,): the weighted sum over the functions that scored; NaN if none with a weight did."""
        is_scored, weights = ~np.isnan(self.values), np.array([config.weight for config in self._configs])
        weighted, counts = self.values * weights, is_scored & (weights != 0)
        return np.where(counts.any(axis=1), np.where(is_scored, weighted, 0.0).sum(axis=1), np.nan)

    @property
    def num_done(self) -> int:
        """How many answers all functions have seen."""
        return int(np.sum(self._num_left == 0))

    def note(self, reward: int, calls: Calls, outcome: list[Any] | str) -> None:
        """Take what a request gave: for each call, a number, None or a problem for each answer; or one problem.

        Raises UsageError for a problem with on_error: stop.
        """
        config = self._configs[reward]
        outcomes = [[outcome] * len(call) for call in calls] if isinstance(outcome, str) else outcome
        for index, value in zip(chain(*calls), chain(*outcomes), strict=True):
            self._num_left[index] -= 1
            if not isinstance(value, str):
                self.values[index, reward] = np.nan if value is None else value
                continue
            item, what = self._items[index], f"reward {config.title}" + (f" ({config.path})" if config.path else "")
            text = printable(f"{what}: {value}; prompt: {item.prompt.origin}; answer: {item.answer[:80]!r}")
            if config.on_error == "stop":
                asked = [one.model_dump(mode="json", exclude_unset=True) for one in self._configs]
                asked[reward] |= {"on_error": "skip"}
                scored = any(one is not config and one.weight for one in self._configs)
                gets = "get the sum of the others" if scored else "have no score, as no other function gives one"
                why = f"trains on without it: its faults are counted, and these answers {gets}"
                what = f"correct {config.path}" if config.function else "correct the row, or what it reads of it"
                raise UsageError(text, [Fix({}, what), Fix({"rollout.rewards": asked}, why)])
            if not self.problems[config.title]:
                done = "scored 0" if config.on_error == "zero" else "left out of the sum"
                self._log(
                    f"{text}; {done} (on_error: {config.on_error}); further problems of it are counted, not shown"
                )
            self.problems[config.title] += 1
            self.values[index, reward] = 0.0 if config.on_error == "zero" else np.nan


class _Child:
    """A process that is started by its first question, and again by the next one after it was lost."""

    def __init__(self, rewards: Sequence[Mapping[str, Any]], log_file: Path) -> None:
        self._rewards, self._log_file = rewards, log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._end, theirs = Pipe()
        theirs.close()

    def load(self) -> Any:
        """Start it, and return the form of each function. Raises UsageError for a file or function not to be used."""
        self._end, theirs = Pipe()
        env = {"OMP_NUM_THREADS": "1", **environment_of_child(), VISIBLE: ""}
        with theirs:
            words = ["-P", "-c", COMMAND, json.dumps(sys.path), str(theirs.fileno())]
            self._process = start_python(words, self._log_file, pass_fds=(theirs.fileno(),), env=env)
        reply = self._reply({"rewards": self._rewards}, LOAD_S)
        if isinstance(reply, str):
            raise UsageError(f"rollout.rewards, loading functions: {reply}; their output is in {self._log_file}")
        return reply

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Any:
        """Return the reply, or what became of the process instead. Raises as `load`."""
        if self._process is None:
            self.load()
        return self._reply(request, limit_s)

    def _reply(self, request: Mapping[str, Any], limit_s: float) -> Any:
        content = json.dumps({**request, "limit_s": limit_s}, default=_plain).encode()
        try:
            self._end.send_bytes(content)
            if self._end.poll(limit_s):
                reply = json.loads(self._end.recv_bytes(MAX_REPLY_BYTES))
                if isinstance(reply, str):  # of no further use
                    self.end()
                return reply
        except (OSError, EOFError, ValueError):
            return self.end(END_S)
        self.end()
        return f"took more than {limit_s:g} s"

    def end(self, wait_s: float = 0.0) -> str:
        """End the process and what it started, unless it ends by itself in `wait_s`; return how it ended."""
        process, self._process = self._process, None
        self._end.close()
        if process is None:
            return "was ended"
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        code = process.returncode
        kill_group(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        if code is None:
            return "broke the connection to its process"
        why = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        return f"ended its process with {why}" + "; memory may be short" * (code == -signal.SIGKILL)


class Rewards:
    """Reward functions in child processes, and reward models in this one: a context manager that starts and ends them.

    Entering it loads every function in one process. Raises UsageError, before any answer exists, for a file that cannot
    be read or run, and for a function of no known form.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        log_file: Path,
        *,
        models: Sequence[RewardModel] = (),
        num_procs: int | None = None,
        log: Callable[[str], None] = to_stderr,
    ) -> None:
        """Read the files of the functions without running them; what they print later goes to `log_file`, whose
        folder exists.

        `models` are those of the reward models, in their order, `num_procs` the processes, None: one per core up to 16.
        Raises UsageError.
        """
        self._configs, self._log_file, self._log = configs, log_file, log
        places = [place for place, config in enumerate(configs) if config.kind == "model"]
        self._models = dict(zip(places, models, strict=True))
        self.digests = {file: digest for model in self._models.values() for file, digest in model.digests.items()}
        """The hash of each file of a function, of the files beside it that it imports, and of reward models."""
        described = [self._described(config) for config in configs if config.kind != "model"]
        self._children = [_Child(described, log_file) for _ in range(usable_procs(num_procs) if described else 0)]
        # the last one that answered is asked first: further ones start only if there is work for them
        self._idle = queue.LifoQueue[_Child]()
        self._forms: dict[str, tuple[str, bool]] = {}
        """Of each function by its title, and whether it is async."""

    def _described(self, config: RewardConfig) -> dict[str, Any]:
        """Return what a process is told of a function, whose file is read and hashed here."""
        described = config.model_dump(mode="json") | {"title": config.title}
        if config.function is None:
            return described
        code = OwnCode.read(config.function, "rollout.rewards", "reward")
        self.digests |= files_of(code)
        path, content = f"{code.path.absolute()}:{code.name}", code.content.decode(FILE_ENCODING)
        return described | {"path": path, "content": content, "digest": code.digest}

    def __enter__(self) -> Self:
        for config in self._configs:
            ready, what = READY_REWARDS.get(config.kind or ""), "is called in worker processes"
            rule = ready.__doc__ if ready else f"{config.path} {what if config.function else 'gives its score'}"
            self._log(f"reward {config.title}, weight {config.weight:g}: {' '.join(str(rule).split())}")
        if self._children:
            self._forms = self._children[0].load()
        for child in reversed(self._children):
            self._idle.put(child)
        return self

    def __exit__(self, *raised: object) -> None:
        self._end_all(END_S)

    def _end_all(self, wait_s: float = 0.0) -> None:
        for child in self._children:
            child.end(wait_s)

    def load_models(self, device: torch.device) -> None:
        """Load the reward models, which stay on the device. Raises like `load_trained`."""
        for model in self._models.values():
            model.load(device)

    def score(self, items: Sequence[Item], on_progress: Callable[[int], None] = lambda done: None) -> Scores:
        """Call all functions on all answers.

        `on_progress` gets the number of answers that are scored, at least twice a second; what it raises, such as a
        request to stop, ends the calls and is raised. Raises UsageError for what goes wrong with on_error: stop.
        """
        scores, answered = Scores(items, self._configs, self._log), queue.SimpleQueue[Future[tuple[_Request, Any]]]()
        with ThreadPoolExecutor(max(1, len(self._children)), "rewards") as threads:

            def submit(requests: Sequence[_Request]) -> int:
                for request in requests:
                    threads.submit(self._ask, request, items).add_done_callback(answered.put)
                return len(requests)

            try:
                num_waiting = submit([*self._requests(items)])
                for reward, model in self._models.items():
                    values = model.scores(items, lambda: on_progress(scores.num_done))
                    scores.note(reward, (tuple(range(len(items))),), [values])
                while num_waiting:
                    on_progress(scores.num_done)
                    if (log := self._log_file).exists() and log.stat().st_size > MAX_LOG_BYTES:
                        os.truncate(log, 0)
                    with suppress(queue.Empty):
                        (reward, calls), outcome = answered.get(timeout=POLL_S).result(timeout=0)
                        num_waiting -= 1
                        if isinstance(outcome, str) and len(calls) > 1:  # one of them, alone, is at fault
                            num_waiting += submit([(reward, (call,)) for call in calls])
                        else:
                            scores.note(reward, calls, outcome)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._end_all()
                raise
        on_progress(scores.num_done)
        return scores

    def _requests(self, items: Sequence[Item]) -> Iterator[_Request]:
        keys = [(item.prompt.origin, item.prompt.text) for item in items]
        groups = [tuple(group) for _, group in groupby(range(len(items)), keys.__getitem__)]
        for reward, config in enumerate(self._configs):
            if reward in self._models:
                continue
            form, is_async = self._forms[config.title]
            calls = groups if form == "trl" else [(index,) for index in range(len(items))]
            size = CALLS_TOGETHER if is_async else 1
            yield from ((reward, tuple(calls[start : start + size])) for start in range(0, len(calls), size))

    def _ask(self, request: _Request, items: Sequence[Item]) -> tuple[_Request, Any]:
        """Ask a process that is idle; return the request with its outcome, as `Scores.note` takes it."""
        reward, calls = request
        config = self._configs[reward]
        bounds_itself = self._forms[config.title][1] or config.kind == "code"
        sent = [[_sent(items[index]) for index in call] for call in calls]
        child = self._idle.get_nowait()
        try:
            return request, child.ask({"reward": config.title, "calls": sent}, config.seconds + GRACE_S * bounds_itself)
        finally:
            self._idle.put(child)


def _sent(item: Item) -> dict[str, Any]:
    prompt = item.prompt
    turns = None if prompt.is_text else prompt.messages
    given = {"prompt": prompt.text, "messages": turns, "row": prompt.row}
    return {**given, "answer": item.answer, "token_ids": item.token_ids}


def _plain(value: Any) -> Any:
    """Return what JSON has instead of a value of a row: lists of arrays, else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
