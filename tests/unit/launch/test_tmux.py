"""tmux's commands as values; and, where tmux is there, a real headless session."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.errors import ResourceError, UsageError
from flatout.launch.tmux import commands, start

LOGS = [Path("/r/logs/latest/rank-0.log"), Path("/r/logs/latest/rank-1.log")]


def test_a_window_for_the_run_and_one_a_gpu() -> None:
    made = commands(
        "train", ["python", "x y.yaml"], LOGS, Path("/here"), {"HF_HOME": "/hf", "HF_TOKEN": "s", "LANG": "C"}
    )
    assert made[0][:6] == ["tmux", "new-session", "-d", "-s", "train", "-n"]
    assert "HF_HOME=/hf" in made[0]
    assert not any(word.partition("=")[2] == "s" or "LANG" in word for word in made[0])
    windows = [command[command.index("-n") + 1] for command in made if "-n" in command[:7]]
    assert windows == ["run", "train_gpu_0", "train_gpu_1"]
    assert made[5][:7] == ["tmux", "new-session", "-d", "-t", "=train", "-s", "train_gpu_1"]
    assert str(LOGS[1]) in made[4]
    assert "x y.yaml" in made[0]


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a:b", "-x", "=x", "a;b", "$(id)", "é", "x" * 65, "a\n", "@1"])
def test_odd_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(UsageError, match="letters, digits, _ and -"):
        commands(name, ["true"], LOGS, Path("/"), {})


def test_without_tmux_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="not installed"):
        start([], "x")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_real_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headless, with odd words; the logs are followed and a second session of the name is refused."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    name = "flatout_test"
    code = "import sys; print('words', sys.argv[1:])"
    words = [sys.executable, "-c", code, "a b", "$HOME", "x;", "'\""]
    made = commands(name, words, [tmp_path / "rank-0.log", tmp_path / "rank 1;.log"], tmp_path, {})
    try:
        start(made, name)
        (tmp_path / "rank-0.log").write_text("first rank\n")
        (tmp_path / "rank 1;.log").write_text("second rank\n")
        assert until_shown(f"{name}:run", "words ['a b', '$HOME', 'x;', '\\'\"']")
        # the names that `tmux attach -t` takes
        assert until_shown(f"={name}_gpu_0:", "first rank")
        assert until_shown(f"={name}_gpu_1:", "second rank")
        with pytest.raises(UsageError, match="already"):
            start(made, name)
    finally:
        subprocess.run(["tmux", "kill-server"], check=False, capture_output=True)


def until_shown(target: str, text: str) -> bool:
    shows = ""
    for _ in range(100):
        done = subprocess.run(
            ["tmux", "capture-pane", "-p", "-S", "-", "-t", target], capture_output=True, text=True, check=False
        )
        shows = done.stdout + done.stderr
        if text in shows:
            return True
        time.sleep(0.1)
    print(shows)
    return False
