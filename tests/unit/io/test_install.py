"""What an error says of a missing package works in this installation: flatout is on no package index."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from flatout import errors

ROOT = Path(__file__).parents[3]


def test_a_clone_installs_itself():
    assert errors.install("images") == f"pip install -e '{ROOT}[images]'"
    assert errors.install("mlflow,eval") == f"pip install -e '{ROOT}[mlflow,eval]'"


def test_elsewhere_the_packages_are_named(tmp_path, monkeypatch):
    """From a wheel, there is no folder to install: the requirements of the extras, without flatout's name."""
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "flatout" / "errors.py"))
    command = errors.install("studio,gguf")
    assert command.startswith("pip install '")
    assert "flatout" not in command
    needed = [text for text in metadata.requires("flatout") or () if re.search("extra == .(studio|gguf).", text)]
    assert needed
    assert all(re.split("[ ;<>=]", text)[0] in command for text in needed)


def test_every_extra_that_an_error_names_exists():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for path in (ROOT / "flatout").rglob("*.py")]
    named = {
        extra for text in texts for extra in re.findall(r"""(?:install\(|needs_extra\(".*?", )['"]([a-z]+)['"]""", text)
    }
    assert {"images", "studio", "remote", "eval", "gguf"} <= named
    assert named <= declared.keys()


def test_no_error_names_an_index():
    """One place spells it."""
    named = [path for path in (ROOT / "flatout").rglob("*.py") if re.search(r"pip install '?flatout", path.read_text())]
    assert not named
