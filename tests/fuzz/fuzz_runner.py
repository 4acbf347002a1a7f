"""Runs cases by the command line's own function, in forked children: thousands fit in a minute, and nothing leaks.

A child runs many cases one after the other, each in a new folder. A case that fails is run again alone, so that
what one case left behind in the process is not held against another. A hang or a death ends the child, not the test.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import xxhash
from fuzz_judge import Case, Outcome, fault

CASES_PER_CHILD = 80
HANG_S = 30
MORE_MEMORY_BYTES = 3 << 30
SOURCE = Path(__file__).parents[2] / "flatout"


def failures(cases: Sequence[Case]) -> dict[str, str]:
    """Name -> fault of every case that fails, also alone."""
    found = {}
    for case, outcome in _outcomes(cases, CASES_PER_CHILD):
        why = fault(case, outcome)
        if why is not None and not outcome.hung:
            ((_, alone),) = _outcomes([case], 1)
            why = fault(case, alone)
        if why is not None:
            found[case.name] = why
    return found


def _outcomes(cases: Sequence[Case], per_child: int) -> Iterator[tuple[Case, Outcome]]:
    left = list(cases)
    while left:
        batch = left[:per_child]
        num_done = 0
        for outcome in _in_child(batch):
            yield batch[num_done], outcome
            num_done += 1
        left = left[num_done:]


def _in_child(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Outcomes of the first cases; ends early, with the last one's outcome, where the child died or hung."""
    reader, writer = os.pipe()
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    with warnings.catch_warnings():
        # the parent has threads of libraries; the child uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reader)
        _be_child(cases, root, writer)
    os.close(writer)
    num_left, ended = len(cases), False
    try:
        for line in _lines(reader):
            yield Outcome(**json.loads(line))
            num_left -= 1
        if num_left:
            ended = True
            yield _end(pid)
    finally:
        # and what it started
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            os.waitpid(pid, 0)
        os.close(reader)
        shutil.rmtree(root, ignore_errors=True)


def _lines(reader: int) -> Iterator[bytes]:
    """Lines as they come, to the end of the pipe or to the first that takes too long."""
    rest = b""
    while select.select([reader], [], [], HANG_S)[0] and (read := os.read(reader, 1 << 16)):
        *lines, rest = (rest + read).split(b"\n")
        yield from lines


def _end(pid: int) -> Outcome:
    """What ended a child before its last case; one that hangs is ended."""
    # its pipe is closed by the kernel a moment before it can be waited for
    pidfd = os.pidfd_open(pid)
    hung = not select.select([pidfd], [], [], 5)[0]
    os.close(pidfd)
    if hung:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if hung:
        return Outcome(None, raised=f"nothing for {HANG_S} s", hung=True)
    return Outcome(None, raised=f"the process died ({signal.Signals(-code).name if code < 0 else f'code {code}'})")


def _be_child(cases: Sequence[Case], root: Path, writer: int) -> None:
    try:
        import huggingface_hub.constants

        from flatout.io import template_limits as limits

        limits.MAX_SECONDS = 1
        # never a network: a hub id fails at once
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        log = os.open(root / "output", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, case in enumerate(cases):
            outcome = _run(case, root / str(number), log)
            os.write(writer, json.dumps(asdict(outcome)).encode() + b"\n")
            shutil.rmtree(root / str(number), ignore_errors=True)
    except BaseException:  # noqa: BLE001  (told, then the child ends)
        traceback.print_exc(file=sys.__stderr__)
        os._exit(99)
    os._exit(0)


def _run(case: Case, folder: Path, log: int) -> Outcome:
    """One case in this process."""
    folder.mkdir()
    os.chdir(folder)
    case.make(folder)
    kept = {name: _digest(folder / name) for name in case.keeps}
    os.environ.clear()
    os.environ.update({
        "PATH": os.defpath, "HOME": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(SOURCE.parent), **case.env,
    })  # fmt: skip
    random.seed(0)
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    before = os.lseek(log, 0, os.SEEK_END)
    sys.stdout, sys.stderr = out, err
    if case.disk_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.disk_bytes, resource.RLIM_INFINITY))
    code, raised = _call(case.argv)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.chdir("/")
    for stream in (out, err):
        stream.flush()
    printed, told = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))
    complaint = next((f"{name} was changed" for name, was in kept.items() if _digest(folder / name) != was), None)
    if complaint is None and code == 0 and case.done is not None:
        complaint = case.done(folder, printed)
    if complaint is None and code not in (0, None) and case.refused is not None:
        complaint = case.refused(folder, told)
    of_others = os.pread(log, 1 << 20, before).decode("utf-8", "replace")
    return Outcome(code, printed, told + of_others, raised, complaint)


def _call(argv: Sequence[str]) -> tuple[int | None, str]:
    from flatout.cli.main import main

    try:
        return main(list(argv)), ""
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1, ""
    except BaseException as error:  # noqa: BLE001  (what escapes is what is looked for)
        return None, f"{type(error).__name__}: {str(error)[:160]!r} in {_place(error)}"


def _place(error: BaseException) -> str:
    """Our innermost function that the exception passed, as room/file:function."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if SOURCE in Path(frame.filename).parents]
    if not frames:
        return "no file of ours"
    return f"{Path(frames[-1].filename).relative_to(SOURCE)}:{frames[-1].name}"


def _digest(path: Path) -> str:
    """The content of a file or of all files of a folder, and links as links."""
    hasher = xxhash.xxh3_128()
    for file in [path, *sorted(path.rglob("*"))] if path.is_dir() and not path.is_symlink() else [path]:
        hasher.update(str(file.relative_to(path)).encode())
        if file.is_symlink():
            hasher.update(str(file.readlink()).encode())
        elif file.is_file():
            hasher.update(file.read_bytes())
        elif not file.is_dir():
            hasher.update(b"absent")
    return hasher.hexdigest()
