"""Long work in a child process, so that neither a crash nor a long tokenization freezes the page."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flatout.errors import reason_of
from flatout.studio.workspace import Workspace

# a page that follows a job gets a line at least this often
TICK_S = 2.0
MAX_LINE_BYTES = 32 << 20

Line = Mapping[str, Any]


@dataclass(eq=False)
class WorkerJob:
    """One request to a worker and the lines it has answered; the last one has `result` or `error`."""

    request: Mapping[str, Any]
    lines: list[Line] = field(default_factory=list)
    _started_s: float = field(default_factory=time.monotonic)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_done(self) -> bool:
        return bool(self.lines) and not self.lines[-1].keys().isdisjoint({"result", "error"})

    def add(self, line: Line) -> None:
        """Append a line and wake those who follow."""
        self.lines.append(line)
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Line]:
        """Yield all lines up to the last, and between them every TICK_S the `elapsed_s` of the job."""
        index = 0
        while True:
            while index < len(self.lines):
                yield self.lines[index]
                index += 1
            if self.is_done:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK_S)
            yield {"elapsed_s": round(time.monotonic() - self._started_s)}


class Worker:
    """A child process that answers one request at a time; it starts with the first one and keeps what it loaded."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._lock = workspace, asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._was_cancelled = False
        self.current: WorkerJob | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, kind: str, **facts: Any) -> WorkerJob:
        """Queue a request for the worker's function `kind` and return it at once; `Job.follow` has the answer."""
        job = WorkerJob({"kind": kind, **facts})
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)  # the event loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)
        return job

    async def close(self) -> None:
        """End the process, whatever it does; the next request starts another."""
        self._was_cancelled = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _run(self, job: WorkerJob) -> None:
        async with self._lock:
            self.current = job
            try:
                await self._exchange(job)
            except (OSError, ValueError) as error:
                await self.close()  # what it says next would be taken for the answer to the next request
                job.add({"error": f"the worker process cannot be used: {reason_of(error)}; try again"})
            finally:
                self.current = None

    async def _exchange(self, job: WorkerJob) -> None:
        """Send a request and pass on the lines of the answer; the end of the process is an error of the request."""
        process = self._process
        if process is None or process.returncode is not None:
            job.add({"log": "starting a worker process"})
            self._was_cancelled = False
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "flatout.studio.worker"),  # -P: modules of the workspace are not imported
                *map(str, self._workspace.models),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=self._workspace.root,
                env=self._workspace.environment,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):  # its end is reported below
            process.stdin.write(json.dumps(job.request).encode() + b"\n")
            await process.stdin.drain()
        while content := await process.stdout.readline():
            line = json.loads(content)
            if not isinstance(line, dict):
                raise ValueError("its answer is no JSON object")
            job.add(line)
            if job.is_done:
                return
        code = await process.wait()
        ended = f"the worker process ended with exit code {code}; it may have run out of memory; try again"
        job.add({"error": "cancelled" if self._was_cancelled else ended})
