"""One run a folder: the second is refused by name, a dead holder holds nothing, an unwritable folder is found."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable

import pytest
from faulty_disk import FULL_DISK, FaultyDisk

from flatout.errors import ResourceError
from flatout.io.durable_io import Disk, DurableIO
from flatout.io.file_lock import RunLock


def in_child(act: Callable[[], None]) -> int:
    """Start a child that acts and then waits to be killed; returns its pid once it has acted."""
    ready, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_second_run_is_refused_and_told_by_whom(tmp_path):
    run_dir = tmp_path / "runs" / "a"
    child = in_child(lambda: RunLock(run_dir).__enter__() and None)
    try:
        with pytest.raises(ResourceError) as raised, RunLock(run_dir):
            pass
        message = str(raised.value)
        assert f"{run_dir} is locked by pid {child} on {socket.gethostname()} since 20" in message
        assert "choose a different run_dir" in message
        assert "gone" not in message
        assert raised.value.exit_code == 6
    finally:
        kill(child)
    with RunLock(run_dir):  # kill -9 left nothing to clean up
        assert json.loads((run_dir / ".lock").read_text())["pid"] == os.getpid()


def test_the_lock_is_free_after_leaving_and_holds_inside_one_process_too(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path):
            with pytest.raises(ResourceError, match=f"locked by pid {os.getpid()}"), RunLock(tmp_path):
                pass
            # the refused one did not release or rewrite anything
            with pytest.raises(ResourceError, match=f"locked by pid {os.getpid()}"), RunLock(tmp_path):
                pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_child_that_outlives_its_run_is_told_apart(tmp_path):
    grandchildren = tmp_path / "pids"

    def hold_and_fork() -> None:
        RunLock(tmp_path / "run").__enter__()
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(60)
            os._exit(0)
        grandchildren.write_text(str(grandchild))

    kill(in_child(hold_and_fork))
    try:
        with pytest.raises(ResourceError, match="process has exited, but one of its"), RunLock(tmp_path / "run"):
            pass
    finally:
        os.kill(int(grandchildren.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}', '{"pid": 1}'])
def test_a_lock_file_that_says_nothing_still_refuses(tmp_path, content):
    with RunLock(tmp_path):
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(ResourceError, match="locked by another process"), RunLock(tmp_path):
            pass


@pytest.mark.parametrize("at", range(6))
def test_an_unwritable_or_full_folder_is_found_before_step_1(tmp_path, at):
    """The probe's operations: create, write, sync, close, unlink; then nothing is left to fail."""
    for error in (errno.EROFS, errno.EACCES, FULL_DISK, errno.EDQUOT):
        durable_io = DurableIO(FaultyDisk(at, error, lasting=True))
        if at == 5:
            with RunLock(tmp_path, durable_io=durable_io):
                pass
            continue
        with pytest.raises(ResourceError, match=r"\.write-probe"), RunLock(tmp_path, durable_io=durable_io):
            pass
        DurableIO(Disk()).remove_tree(tmp_path / ".write-probe")
        with RunLock(tmp_path):  # a refusal lets go of the lock
            pass


def test_a_file_in_the_folders_place_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ResourceError, match="run: Not a directory"), RunLock(tmp_path / "run"):
        pass
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    with pytest.raises(ResourceError, match=r"cannot open .*other/\.lock: Is a directory"), RunLock(tmp_path / "other"):
        pass


def test_a_run_whose_folder_is_deleted_takes_it_again(tmp_path):
    run_dir = tmp_path / "run"
    with RunLock(run_dir) as lock:
        lock.keep()
        shutil.rmtree(run_dir)
        lock.keep()
        with pytest.raises(ResourceError, match=f"locked by pid {os.getpid()}"), RunLock(run_dir):
            pass
        (run_dir / ".lock").unlink()
        lock.keep()
        with pytest.raises(ResourceError, match=f"locked by pid {os.getpid()}"), RunLock(run_dir):
            pass


def test_a_run_whose_folder_another_one_took_must_stop(tmp_path):
    run_dir = tmp_path / "run"
    with RunLock(run_dir) as lock:
        shutil.rmtree(run_dir)
        child = in_child(lambda: RunLock(run_dir).__enter__() and None)
        try:
            with pytest.raises(ResourceError, match=rf"was deleted during .* and now .* is locked by pid {child}"):
                lock.keep()
        finally:
            kill(child)
