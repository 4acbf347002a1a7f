"""The process that calls reward functions: JSON in, JSON out.

Nothing of it is imported by a run but `COMMAND`. It imports neither torch nor pydantic, so that it starts at once.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
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

Scored: TypeAlias = list[float | str | None]


@dataclass(frozen=True, slots=True)
class _Reward:
    call: Callable[..., Any]
    signature: Signature
    path: Path
    """The file to name lines of, in errors."""
    seconds: float
    memory_bytes: int

    def scores(self, items: Sequence[Mapping[str, Any]], runner: asyncio.Runner) -> Scored:
        """Return what one call says of its answers: scores, None, and texts that say what is wrong."""
        try:
            result = self.call(**self.signature.arguments(items))
            if inspect.isawaitable(result):
                result = runner.run(self._awaited(result))
            return values_of(result, self.signature, len(items))
        except BaseException as error:  # noqa: BLE001  (whatever a person's code raises, sys.exit too)
            return [_said(error, self.path)] * len(items)

    async def scores_together(self, calls: Sequence[Sequence[Mapping[str, Any]]]) -> list[Scored]:
        """Return what `scores` returns of each call; they wait at the same time."""
        return list(await asyncio.gather(*map(self._scores, calls)))

    async def _scores(self, items: Sequence[Mapping[str, Any]]) -> Scored:
        try:
            result = await self._awaited(self.call(**self.signature.arguments(items)))
            return values_of(result, self.signature, len(items))
        except BaseException as error:  # noqa: BLE001  (as above)
            return [_said(error, self.path)] * len(items)

    async def _awaited(self, result: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self.seconds):
            return await result


def serve(fd: int) -> None:
    """Answer the requests that come through a pipe, until the parent closes it or dies."""
    with suppress(OSError):  # where memory runs out, the kernel ends this process, not the trainer
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
    rewards: list[_Reward] = []
    # one loop for all calls: a client that a person's code keeps belongs to the loop in which it was made
    with asyncio.Runner() as runner, Connection(fd) as parent, suppress(EOFError):
        while True:
            request = json.loads(parent.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + _ORPHAN_S)
            reply = _loaded(request, rewards) if "rewards" in request else _scored(request, rewards, runner)
            signal.setitimer(signal.ITIMER_REAL, 0)
            parent.send_bytes(json.dumps(reply).encode())


def _loaded(request: Mapping[str, Any], rewards: list[_Reward]) -> Any:
    for given in request["rewards"]:
        _limit_memory(memory_bytes := int(given["memory_gb"] * (1 << 30)))
        try:
            if given["path"] is None:
                function, path, name = make_ready(given), Path(__file__), given["kind"]
            else:
                content = base64.b64decode(given["content"])
                path, name = Path(given["path"]), f"{given['path']}:{given['function']}"
                code = OwnCode("rollout.rewards", "reward", path, given["function"], content, given["digest"])
                if not callable(function := code.load()):
                    what = "has no such function" if function is None else "is no function"
                    raise UsageError(f"{name} {what}; define def {code.name}(answer, row) in it")
            signature = signature_of(function, name)
        except FlatoutError as error:
            return {"kind": error.kind, "error": error.text}
        except BaseException as error:  # noqa: BLE001  (whatever a person's code raises)
            return {"kind": "UsageError", "error": f"{given['title']}: {_said(error, Path(given['path'] or __file__))}"}
        rewards.append(_Reward(function, signature, path.absolute(), given["seconds"], memory_bytes))
    return [{"form": reward.signature.form, "is_async": reward.signature.is_async} for reward in rewards]


def _scored(request: Mapping[str, Any], rewards: Sequence[_Reward], runner: asyncio.Runner) -> Any:
    reward: _Reward = rewards[request["reward"]]
    _limit_memory(reward.memory_bytes)
    if reward.signature.is_async:
        return runner.run(reward.scores_together(request["calls"]))
    # outside of the loop: a function may run one of its own
    return [reward.scores(items, runner) for items in request["calls"]]


def _limit_memory(num_bytes: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if most < 0 else min(num_bytes, most), most))


def _said(error: BaseException, path: Path) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  (its own __str__)
        text = ""
    line = line_of(error, path.absolute())
    return f"{type(error).__name__}: {text}"[:_MAX_SAID] + (f" ({path.name}{line})" if line else "")
