"""`flatout train` on a terminal: a bar, with one process and with two ranks; logs hold plain lines."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launching import DEADLINE_S, launch, settings, wait_for_steps
from spawned_ranks import start_ranks

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.track.run_log import read_end


class Terminal:
    """What a pseudo-terminal of 80 columns was sent; `text` is without control sequences."""

    def __init__(self) -> None:
        self.sent = b""

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.sent.decode()).replace("\r", "\n")

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield the file descriptor to write to; at the end, all of it has been read."""
        master, slave = os.openpty()

        def read() -> None:
            # reading fails once nobody has the terminal open
            try:
                while block := os.read(master, 1 << 16):
                    self.sent += block
            except OSError:
                pass

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield slave
        finally:
            os.close(slave)
            reader.join(DEADLINE_S)
            os.close(master)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    # must not put a bar into the ranks' logs
    monkeypatch.setenv("FORCE_COLOR", "1")


def check(terminal: Terminal, run: Path, num_steps: int) -> None:
    assert f"{num_steps}/{num_steps}  loss" in terminal.text
    assert "━" in terminal.text
    assert "Loading weights" not in terminal.text
    lines = terminal.text.splitlines()
    assert not [line for line in lines if line.startswith("step  ")]
    # only paths and commands, which must stay whole, are wider than the terminal
    assert not [line for line in lines if len(line) > 80 and len(line.split()) > 1 and " flatout " not in line]
    assert "\x1b" not in "".join(path.read_text() for path in run.rglob("*.log"))
    summary = terminal.text[terminal.text.index("summary    ") :]
    assert f"complete, {num_steps} of {num_steps} steps" in summary
    assert f"flatout chat {run}" in summary


def test_one_process_shows_a_bar_on_a_terminal(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run", batch={"max_steps": 3})))
    terminal = Terminal()
    with terminal.opened() as fd, os.fdopen(fd, "w", closefd=False) as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        assert main(["train", str(tmp_path / "run.yaml")]) == 0
    check(terminal, tmp_path / "run", 3)


def test_two_ranks_show_a_bar_on_a_terminal(tiny: Any, tmp_path: Path) -> None:
    batch = {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 3}
    terminal = Terminal()
    with terminal.opened() as fd:
        process = launch(tiny.config(tmp_path / "run", **settings(tiny, batch=batch)), tmp_path, stdout=fd)
        assert process.wait(timeout=DEADLINE_S) == 0, terminal.text
    check(terminal, tmp_path / "run", 3)
    # rank 0's log says as much as a pipe would
    assert re.search(r"^step +3/3 ", (tmp_path / "run" / "logs" / "latest" / "rank-0.log").read_text(), re.M)


@pytest.mark.exhaustive
def test_a_blocked_rank_that_is_ended_leaves_the_cursor_shown(tiny: Any, tmp_path: Path) -> None:
    """Under another launcher, where rank 0 has the terminal: a collective with a stopped rank holds it."""
    batch = {"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 100_000}
    config = tiny.config(tmp_path / "run", **settings(tiny, batch=batch, faults={"hang_s": 3}))
    (tmp_path / "run.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "flatout", "train", str(tmp_path / "run.yaml")]
    terminal = Terminal()
    with terminal.opened() as fd:
        ranks = start_ranks([command, command], stdout=fd, stderr=subprocess.DEVNULL)
        try:
            wait_for_steps(tmp_path / "run", 3)
            while b"\x1b[?25l" not in terminal.sent:
                assert ranks[0].poll() is None
                time.sleep(0.05)
            ranks[1].send_signal(signal.SIGSTOP)
            assert ranks[0].wait(DEADLINE_S) == 7
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert terminal.sent.rfind(b"\x1b[?25h") > terminal.sent.rfind(b"\x1b[?25l")
    end = read_end(tmp_path / "run")
    assert end is not None
    assert (end.outcome, end.exit_code) == ("failed", 7)
    assert "rank 1 on" in str(end.why)
