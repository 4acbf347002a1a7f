"""The import names of other trainers are there on request, and never before an installed package of that name."""

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
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """flatout-migrate, and its names."""
    folder, build = tmp_path_factory.mktemp("wheels"), [*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", folder, MIGRATE, MIGRATE / "names"], check=True)
    return next(folder.glob("flatout_migrate-*.whl")), next(folder.glob("flatout_migrate_names-*.whl"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ours_first", [True, False])
def test_an_installed_original_comes_first_in_any_order(
    wheels: tuple[Path, Path], ours_first: bool, tmp_path: Path
) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)

    def pip(*words: str | Path) -> None:
        subprocess.run([*PIP, "--python", python, *words], check=True, capture_output=True)

    def found() -> list[str]:
        """The file of each name, or None."""
        return subprocess.run([python, "-c", SHOW, *NAMES], check=True, capture_output=True, text=True).stdout.split()

    install, (package, names), theirs = ("install", "--no-deps", "--no-index"), wheels, original("trl", tmp_path)
    pip(*install, package)
    assert found() == ["None"] * len(NAMES)  # they are there on request only
    for path in (names, theirs) if ours_first else (theirs, names):
        pip(*install, path)
    trl, *others = found()
    assert trl.endswith("site-packages/trl/__init__.py")
    assert all("/flatout_migrate/names/" in each for each in others)
    pip("uninstall", "-y", "trl")
    assert all("/flatout_migrate/names/" in each for each in found())
    pip(*install, theirs)
    pip("uninstall", "-y", "flatout-migrate-names")
    trl, *others = found()
    assert trl.endswith("site-packages/trl/__init__.py")
    assert others == ["None"] * len(others)
