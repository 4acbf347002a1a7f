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


def installed_version(site: Path) -> str:
    """The version of flatout's metadata in a folder."""
    [folder] = site.glob("flatout-*.dist-info")
    return folder.name.removeprefix("flatout-").removesuffix(".dist-info")


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
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_both_wheels_of_a_clean_export_work_away_from_it(tiny, tmp_path):
    """Of the commit, as `make release` builds them: what no test of a clone would miss."""
    archive, source, wheels = tmp_path / "source.tar", tmp_path / "source", tmp_path / "wheels"
    subprocess.run(["git", "archive", "-o", str(archive), "HEAD"], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*command, str(source), str(source / "migrate")], check=True)
    shutil.rmtree(source)
    for wheel in wheels.iterdir():
        env = installed(wheel, tmp_path / "site")

    def flatout(*words: str) -> str:
        python = [sys.executable, "-P", "-m", "flatout", *words]
        return subprocess.run(
            python, cwd=tmp_path, env=env, check=True, timeout=600, stdout=subprocess.PIPE
        ).stdout.decode()

    assert flatout("--version").split() == ["flatout", installed_version(tmp_path / "site")]
    sets = f"model={tiny.model_dir}", f"data={tiny.chats}", "device=cpu", "batch.max_steps=2", "data.template=chatml"
    flatout("train", *sets, "name=short")
    flatout("report", "runs/short")
    assert "<script" in (tmp_path / "runs" / "short" / "report.html").read_text()
    theirs = tmp_path / "axolotl.yaml"
    theirs.write_text(f"base_model: {tiny.model_dir}\ndatasets:\n  - {{path: {tiny.chats}, type: chat_template}}\n")
    assert "model" in flatout("convert", str(theirs))


@pytest.mark.exhaustive
def test_the_demo_runs_from_the_wheel(wheel, tmp_path):
    env = installed(wheel, tmp_path / "site")
    command = [sys.executable, "-P", "-m", "flatout", "demo"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=900)
