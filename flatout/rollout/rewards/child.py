"""The process that calls reward functions: JSON in, JSON out.

Nothing of it is imported by a run but `COMMAND`. It imports neither torch nor pydantic, so that it starts at once.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from flatout.config.own_code import OwnCode, line_of
from flatout.errors import FlatoutError, UsageError
from flatout.rollout.rewards.ready import make_ready
from flatout.rollout.rewards.signatures import Signature, signature_of, values_of

# imports from where the parent does, whose script may have no `if __name__ == "__main__"`: it must not run again
COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from flatout.rollout.rewards.child import serve; serve(int(sys.argv[2]))"
)
# how much later than its parent would end it this process ends itself, which is for a parent that was killed
_ORPHAN_S = 5.0
_MAX_SAID = 300
# of a file in JSON, one character a byte
FILE_ENCODING = "latin-1"

Call: TypeAlias = Sequence[Mapping[str, Any]]
"""The answers that a function gets at once."""
Scored: TypeAlias = list[float | str | None]
"""For each answer of a call: a score, None, or a text that says what is wrong."""


@dataclass(frozen=True, slots=True)
class _Reward:
    function: Callable[..., Any]
    signature: Signature
    path: Path
    """The file to name lines of, in errors."""
    seconds: float
    memory_bytes: int

    def scores(self, calls: Sequence[Call], runner: asyncio.Runner) -> list[Scored]:
        """Return what each call says of its answers; async ones wait at the same time. Raises MemoryError."""
        _limit_memory(self.memory_bytes)
        try:
            # outside of the loop: a function may run one of its own
            results = [self._called(items) for items in calls]
            return runner.run(self._all_scores(results, calls))
        finally:
            _limit_memory()

    def _called(self, items: Call) -> Any:
        try:
            return self.function(**self.signature.arguments(items))
        except BaseException as error:  # noqa: BLE001  (whatever a person's code raises, sys.exit too)
            return error

    async def _all_scores(self, results: Sequence[Any], calls: Sequence[Call]) -> list[Scored]:
        return list(await asyncio.gather(*map(self._scores, results, calls)))

    async def _scores(self, result: Any, items: Call) -> Scored:
        try:
            if isinstance(result, BaseException):
                raise result
            if inspect.isawaitable(result):
                async with asyncio.timeout(self.seconds):
                    result = await result
            return values_of(result, self.signature, len(items))
        except BaseException as error:  # noqa: BLE001  (as above)
            if _is_of_memory(error):
                raise MemoryError(_said(error, self.path)) from None
            said, row = _said(error, self.path), items[0]["row"]
            # a column that the row lacks: of row[...], or of a call without a parameter that the function requires
            is_of_row = isinstance(error, KeyError) and error.args[:1] not in [(name,) for name in row]
            if is_of_row or (isinstance(error, TypeError) and not line_of(error, self.path)):
                said += f"; the row's columns are: {', '.join(row)}"[:_MAX_SAID]
            return [said] * len(items)


def serve(fd: int) -> None:
    """Answer the requests that come through a pipe, until the parent closes it or dies."""
    with suppress(OSError):  # where memory runs out, the kernel ends this process, not the trainer
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
    rewards, own_pid = dict[str, _Reward](), os.getpid()
    # one loop for all calls: a client that a person's code keeps belongs to the loop in which it was made
    with asyncio.Runner() as runner, Connection(fd) as parent, suppress(EOFError):
        while True:
            request = json.loads(parent.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + _ORPHAN_S)
            try:
                if "calls" in request:
                    reply: Any = rewards[request["reward"]].scores(request["calls"], runner)
                else:
                    rewards = {given["title"]: _loaded(given) for given in request["rewards"]}
                    reply = {title: (one.signature.form, one.signature.is_async) for title, one in rewards.items()}
            except (FlatoutError, MemoryError) as error:
                reply = str(error)  # a text ends this process: what fills its memory would fail other calls, too
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != own_pid:
                os._exit(0)  # a person's code has forked, and this is the copy
            parent.send_bytes(json.dumps(reply).encode())


def _loaded(given: Mapping[str, Any]) -> _Reward:
    """Load a function, within its limit of memory. Raises UsageError for one that cannot be used."""
    _limit_memory(memory_bytes := int(given["memory_gb"] * (1 << 30)))
    named = given["path"] or f"{__file__}:{given['kind']}"
    file, _, name = named.rpartition(":")
    try:
        if given["path"] is None:
            function = make_ready(given)
        else:
            content = given["content"].encode(FILE_ENCODING)
            function = OwnCode("rollout.rewards", "reward", Path(file), name, content, given["digest"]).load()
        if not callable(function):
            what = "has no such function" if function is None else "is no function"
            raise UsageError(f"{named} {what}; define def {name}(answer, row) in it")
        return _Reward(function, signature_of(function, named), Path(file), given["seconds"], memory_bytes)
    except FlatoutError:
        raise
    except BaseException as error:
        raise UsageError(f"{given['title']}: {_said(error, Path(file))}") from error


def _limit_memory(num_bytes: int = 1 << 62) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if most < 0 else min(num_bytes, most), most))


def _is_of_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
        error = error.__cause__ or error.__context__
    return error is not None


def _said(error: BaseException, path: Path) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  (its own __str__)
        text = ""
    line = line_of(error, path)
    return f"{type(error).__name__}: {text}"[:_MAX_SAID] + (f" ({path.name}{line})" if line else "")
