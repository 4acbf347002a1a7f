"""The wheel, installed away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

API = """
import flatout
assert flatout.__file__.startswith({site!r}), flatout.__file__
run = flatout.train(model={model!r}, data={chats!r}, device="cpu", max_steps=2, samples_per_step=4,
                    eval={{"fraction": 0.1, "max_new_tokens": 2}})
assert "<iframe" in run.plot()._repr_html_()
assert run.chat("Hello", max_new_tokens=2) is not None
run.merge("merged")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # a copy, as a build leaves folders behind
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "flatout"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True)
    return next(folder.glob("flatout-*.whl"))


def installed(wheel: Path, site: Path) -> dict[str, str]:
    """Unpack a wheel as an installer does; return the environment in which it is found, and nothing of this project."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return {**os.environ, "PYTHONPATH": str(site)}


def test_the_wheel_has_every_file_that_git_has_in_the_package(wheel):
    git = shutil.which("git")
    known = git and subprocess.run([git, "ls-files", "flatout"], cwd=ROOT, capture_output=True, text=True)
    if not known or known.returncode or not known.stdout:
        pytest.skip("not a git checkout, or no git")
    with zipfile.ZipFile(wheel) as file:
        assert set(known.stdout.split()) <= set(file.namelist())


def test_the_wheel_trains_reports_chats_and_merges(tiny, wheel, tmp_path):
    env = installed(wheel, tmp_path / "site")
    code = API.format(site=str(tmp_path / "site"), model=str(tiny.model_dir), chats=str(tiny.chats))
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, check=True, timeout=600)
    assert (tmp_path / "merged" / "config.json").exists()


@pytest.mark.exhaustive
def test_the_demo_runs_from_the_wheel(wheel, tmp_path):
    env = installed(wheel, tmp_path / "site")
    command = [sys.executable, "-P", "-m", "flatout", "demo"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=900)
