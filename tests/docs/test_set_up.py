"""The two commands of README on an empty machine: what is pinned, what `make setup` says, and the files they make."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_server import local_server
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import make_venv  # noqa: E402  (the repository's own script, in no package)

# the oldest promised, Debian 12's, and the newer ones
PROMISED = ("3.11.0", "3.11.2", "3.12.0", "3.13.0")
# of Debian 12
GLIBC = (2, 36)


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def installed() -> Iterator[metadata.Distribution]:
    """The packages of this environment that are pinned, at their pinned version."""
    wanted = pins()
    for found in metadata.distributions():
        if wanted.get(normal(found.metadata["Name"])) == found.version.partition("+")[0]:
            yield found


def refused_by(requires_python: str | None) -> list[str]:
    return [version for version in PROMISED if not SpecifierSet(requires_python or "").contains(version)]


def test_every_pin_admits_every_promised_python():
    """Also those that no test machine has: Debian 12's Python is older than most."""
    oldest = re.search(r'requires-python = ">=(.+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert oldest[1] == PROMISED[0].removesuffix(".0")
    assert refused_by(">=3.11.5") == ["3.11.0", "3.11.2"]
    found = list(installed())
    assert len(found) > 100
    refused = {each.metadata["Name"]: refused_by(each.metadata.get("Requires-Python")) for each in found}
    assert not {name: versions for name, versions in refused.items() if versions}


def test_every_pinned_wheel_runs_on_the_oldest_system():
    for each in installed():
        tags = re.findall(r"^Tag: (\S+)$", each.read_text("WHEEL") or "", re.M)
        floors = [(int(a), int(b)) for tag in tags for a, b in re.findall(r"manylinux_(\d+)_(\d+)", tag)]
        assert not floors or min(floors) <= GLIBC, each.metadata["Name"]


def test_everything_that_the_extra_dev_needs_is_pinned():
    """A package without a pin is another one tomorrow."""
    by_name = {normal(found.metadata["Name"]): found for found in metadata.distributions()}
    wanted, waiting = set[str](), [("flatout", "dev")]
    while waiting:
        name, extra = waiting.pop()
        for text in by_name[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                new = {(normal(needed.name), extra) for extra in ("", *needed.extras)} - wanted
                wanted |= new
                waiting += [pair for pair in new if pair[0] in by_name]
    names = {name for name, _ in wanted}
    assert {"torch", "pytest", "setuptools", "tomli"} <= names
    # torch's build for CUDA pins what it needs itself
    assert {name for name in names if not re.match(r"nvidia-|cuda-|triton$", name)} <= pins().keys()


def test_the_script_is_readable_by_pythons_that_are_too_old():
    ast.parse((ROOT / "make_venv.py").read_text(), feature_version=(3, 7))


@pytest.fixture
def old_python(tmp_path):
    """A command that is this Python and says that it is 3.10."""
    command = tmp_path / "python3.10"
    code = (
        "import runpy, sys; sys.version_info = (3, 10, 13, 'final', 0); sys.argv = sys.argv[1:]; "
        "sys.path[0] = ''; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command.write_text(f'#!/bin/sh\nexec \'{sys.executable}\' -c "{code}" "$@"\n')
    command.chmod(0o755)
    return command


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_names_a_python_that_is_too_old_before_it_makes_anything(old_python, tmp_path):
    venv = tmp_path / "venv"
    # under `make test` this make would be a sub-make, which has other first lines
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-C", str(ROOT), "setup", f"PYTHON={old_python}", f"VENV={venv}"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    said, *rest = done.stderr.splitlines()
    assert re.match(r"make: flatout needs Python 3\.11 or newer; \S+ is Python 3\.10\.13; .*make PYTHON=python3", said)
    assert not [line for line in rest if not line.startswith("make")]
    assert not venv.exists()


def test_this_python_makes_one(tmp_path):
    assert make_venv.problem_of(tmp_path / "venv") is None
    assert make_venv.problem_of(Path(sys.prefix)) is None


def test_what_is_missing_or_damaged_is_named(tmp_path, monkeypatch):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(tmp_path / "gone")
    assert f"rm -r {tmp_path}/venv" in str(make_venv.problem_of(tmp_path / "venv"))
    monkeypatch.setattr(make_venv, "find_spec", lambda name: None)
    assert "apt install python3-venv" in str(make_venv.problem_of(tmp_path / "new"))


def test_a_long_step_shows_what_it_does(monkeypatch, tmp_path):
    monkeypatch.setattr(make_venv, "LINE_S", 0.05)
    go_on, stop = tmp_path / "go on", tmp_path / "stop"
    wait = "\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)\n"
    child = (
        "import pathlib, time\n"
        "print('  Downloading torch-2.13.0-cp311-linux.whl (191.8 MB)\\nProgress 96000000 of 191800000', flush=True)"
        + wait.format(str(go_on))
        + "print('Installing collected packages: a, b, c', flush=True)"
        + wait.format(str(stop))
    )
    shown: list[str] = []

    def write(text: str, **_: object) -> None:
        """Let the child go on when its step has been shown."""
        shown.append(text)
        if "96 of 192 MB" in text:
            go_on.touch()
        if "installing 3 packages" in text:
            stop.touch()

    monkeypatch.setattr(make_venv, "print", write, raising=False)
    make_venv.run("Installing torch", [sys.executable, "-c", child])
    assert shown[0] == "Installing torch"
    assert any(re.fullmatch(r"  \d+ s  downloading torch, 96 of 192 MB", line) for line in shown)
    assert any(re.fullmatch(r"  \d+ s  installing 3 packages", line) for line in shown)


def test_a_step_that_fails_ends_with_what_pip_said(capsys):
    child = "print('Collecting x'); print('ERROR: no matching distribution'); raise SystemExit(3)"
    with pytest.raises(SystemExit, match="failed with exit code 3"):
        make_venv.run("Installing", [sys.executable, "-c", child])
    assert "no matching distribution" in capsys.readouterr().err
    make_venv.run("Compiling", [sys.executable, "-c", child], check=False)


class Index(BaseHTTPRequestHandler):
    """An index that has torch."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_cpu_build_is_taken_from_its_index_if_that_answers(monkeypatch, capsys):
    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(make_venv, "ctypes", SimpleNamespace(CDLL=no_driver))
    with local_server(Index) as url:
        monkeypatch.setattr(make_venv, "CPU_INDEX", f"{url}/whl")
        assert make_venv.torch_index() == ["--extra-index-url", f"{url}/whl"]
        monkeypatch.setattr(make_venv, "CPU_INDEX", f"{url}/other")
        assert make_venv.torch_index() == []
    assert make_venv.torch_index() == []
    assert capsys.readouterr().out.count("does not answer") == 2
    monkeypatch.setattr(make_venv, "ctypes", SimpleNamespace(CDLL=str))
    assert make_venv.torch_index() == []
    assert "torch with CUDA" in capsys.readouterr().out


def test_the_pages_name_the_commands_and_the_cpu_build_first():
    readme, install = (ROOT / "README.md").read_text(), (ROOT / "docs" / "install.md").read_text()
    assert len(readme.splitlines()) <= 140
    first = readme.partition("```bash\n")[2].partition("```")[0]
    assert [line.split("  ")[0] for line in first.splitlines()] == [
        "apt install python3 python3-venv git make", "make demo", "make test",
    ]  # fmt: skip
    for page in (readme, install):
        assert f"pip install -c constraints.txt --extra-index-url {make_venv.CPU_INDEX} -e ." in page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert not re.search(r"^ *python -m venv", page.read_text(), re.M), page


def test_git_ignores_what_the_pages_make():
    made = {"demo-run/", "demo-images/", "demo-rl/", "runs/", "merged/", "chats.jsonl", "run.yaml", ".venv/"}
    ignored = {line.lstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert made <= ignored
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert all(name.rstrip("/") in readme for name in ("demo-run", "merged", "chats.jsonl", "run.yaml"))
    assert "DEMO := demo-run\n" in makefile
    assert re.search(r"^\trm -rf .*\$\(DEMO\)", makefile, re.M)
