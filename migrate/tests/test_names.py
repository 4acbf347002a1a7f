"""The import names of other trainers come from the wheel alone, and never before an installed package of that name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

MIGRATE = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip"]
NAMES = "trl", "unsloth", "opensloth", "HyperSloth", "hypersloth"
SHOW = "import importlib.util as u, sys; print(*(getattr(u.find_spec(name), 'origin', None) for name in sys.argv[1:]))"


def original(name: str, folder: Path) -> Path:
    """Write a wheel of a package that has the name of another trainer."""
    info, path = f"{name}-1.0.dist-info", folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, MIGRATE], check=True)
    return next(folder.glob("flatout_migrate-*.whl"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ours_first", [True, False])
def test_an_installed_original_comes_first_in_any_order(wheel: Path, ours_first: bool, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)

    def pip(*words: str | Path) -> None:
        subprocess.run([*PIP, "--python", python, *words], check=True, capture_output=True)

    def found() -> list[str]:
        """The file of each name, or None."""
        return subprocess.run([python, "-c", SHOW, *NAMES], check=True, capture_output=True, text=True).stdout.split()

    assert found() == ["None"] * len(NAMES)
    theirs = original("trl", tmp_path)
    for path in (wheel, theirs) if ours_first else (theirs, wheel):
        pip("install", "--no-deps", "--no-index", path)
    trl, *others = found()
    assert trl.endswith("site-packages/trl/__init__.py")
    assert all("/flatout_migrate/names/" in each for each in others)
    pip("uninstall", "-y", "trl")
    assert all("/flatout_migrate/names/" in each for each in found())
    pip("install", "--no-deps", "--no-index", theirs)
    pip("uninstall", "-y", "flatout-migrate")
    trl, *others = found()
    assert trl.endswith("site-packages/trl/__init__.py")
    assert others == ["None"] * len(others)
