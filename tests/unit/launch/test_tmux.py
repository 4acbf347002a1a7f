"""tmux's commands as values; and, where tmux is there, real headless sessions."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import ResourceError, UsageError
from flatout.launch.tmux import commands, start

NEEDS_TMUX = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
# what tmux's formats, styles, times and commands, or a shell, would read as their own
ODD = (
    "#(touch X)", "#{pane_pid}", "###(touch X)", "##x", "#[fg=red]", "##[bold]", "#{?1,#(touch X),b}", "#h", "#,",
    "%Y %%", "end;", "end\\;", "a;touch X", "$(touch X)", "`touch X`", "~", "-c", "two\nlines",
)  # fmt: skip
LOGS = [Path("/r/logs/latest/rank-0.log"), Path("/r/logs/latest/rank-1.log")]


def test_a_window_for_the_run_and_one_a_gpu():
    made = commands("train", ["python", "x y.yaml"], LOGS, {"HF_HOME": "/hf", "HF_TOKEN": "s", "LANG": "C"})
    assert made[0][:6] == ["tmux", "new-session", "-d", "-s", "train", "-n"]
    assert "HF_HOME=/hf" in made[0]
    assert not any(word.partition("=")[2] == "s" or "LANG" in word for word in made[0])
    windows = [command[command.index("-n") + 1] for command in made if "-n" in command[:7]]
    assert windows == ["run", "train_gpu_0", "train_gpu_1"]
    assert made[5][:7] == ["tmux", "new-session", "-d", "-t", "=train", "-s", "train_gpu_1"]
    assert str(LOGS[1]) in made[4]
    assert "x y.yaml" in made[0]


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a:b", "-x", "=x", "a;b", "$(id)", "é", "x" * 65, "a\n", "@1"])
def test_odd_names_are_refused_with_the_rule(name):
    with pytest.raises(UsageError, match="letters, digits, _ and -"):
        commands(name, ["true"], LOGS, {})


def test_without_tmux_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="not installed"):
        start([], "x", tmp_path)


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """A tmux server of the test's own, with a session that keeps it alive."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path_factory.mktemp("t")))
    monkeypatch.delenv("TMUX", raising=False)
    subprocess.run(["tmux", "new-session", "-d", "-s", "keep"], check=True)
    yield
    subprocess.run(["tmux", "kill-server"], check=False, capture_output=True)


@NEEDS_TMUX
@pytest.mark.usefixtures("server")
def test_a_real_session(tmp_path):
    """Headless, with odd words; the logs are followed and a second session of the name is refused."""
    name = "flatout_test"
    # it stays: tmux may lose the last words of a process that ends
    code = "import sys; print('words', sys.argv[1:]); sys.stdin.readline()"
    words = [sys.executable, "-c", code, "a b", "$HOME", "x;", "'\""]
    made = commands(name, words, [tmp_path / "rank-0.log", tmp_path / "rank 1;.log"], {})
    start(made, name, tmp_path)
    (tmp_path / "rank-0.log").write_text("first rank\n")
    (tmp_path / "rank 1;.log").write_text("second rank\n")
    assert until_shown(f"{name}:run", "words ['a b', '$HOME', 'x;', '\\'\"']")
    # the names that `tmux attach -t` takes
    assert until_shown(f"={name}_gpu_0:", "first rank")
    assert until_shown(f"={name}_gpu_1:", "second rank")
    with pytest.raises(UsageError, match="already"):
        start(made, name, tmp_path)


@NEEDS_TMUX
@pytest.mark.usefixtures("server")
def test_tmux_reads_nothing_into_names(tmp_path):
    """Folders, words, variables and log paths that look like formats or commands arrive as they are; none is run."""
    code = """import json, os, sys
open('new', 'w').write(json.dumps([os.getcwd(), os.environ['HF_HOME'], sys.argv[1]]))
os.rename('new', 'told')"""
    for number, odd in enumerate(ODD):
        folder, log = tmp_path / "at" / odd, tmp_path / "logs" / odd
        for path in (folder, log.parent):
            path.mkdir(parents=True, exist_ok=True)
        log.write_text(f"log {number}\n")
        name = f"odd{number}"
        start(commands(name, [sys.executable, "-c", code, odd], [log], {"HF_HOME": odd}), name, folder)
        assert until_shown(f"={name}_gpu_0:", f"log {number}")
        assert until(lambda told=folder / "told": told.exists(), name)
        assert json.loads((folder / "told").read_text()) == [str(folder), odd, odd]
    assert not list(tmp_path.rglob("X"))


@NEEDS_TMUX
@pytest.mark.usefixtures("server")
def test_a_folder_that_looks_like_a_format_trains(tiny, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "#{pane_pid} #(touch X)"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_dir = folder / "run"
    (folder / "run.yaml").write_text(dump_config(tiny.config(run_dir, batch={"max_steps": 1})))
    assert main(["train", "run.yaml", "--tmux", "here", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"cd {shlex.quote(str(folder))}"
    # every option of the command comes along, but those that say how to start it
    for words in (["-v"], ["--yes"], ["--restart"], ["--profile=2"], ["optim.lr=1e-3"]):
        assert main(["train", "run.yaml", "--tmux", "here", "--dry-run", *words]) == 0
        assert words[0] in capsys.readouterr().out
    assert main(["train", "run.yaml", "--tmux", "here"]) == 0
    assert until((run_dir / "end.json").exists, "here")
    assert json.loads((run_dir / "end.json").read_text())["outcome"] == "complete"
    assert not list(tmp_path.rglob("X"))


def shown(target: str) -> str:
    done = subprocess.run(
        ["tmux", "capture-pane", "-p", "-S", "-", "-t", target], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def until_shown(target: str, text: str) -> bool:
    return until(lambda: text in shown(target), target)


def until(done: Callable[[], bool], target: str) -> bool:
    """Wait for what happens; the bound ends a hang, and prints what the window shows."""
    until_s = time.monotonic() + 600
    while time.monotonic() < until_s:
        if done():
            return True
        time.sleep(0.05)
    print(shown(target))
    return False
