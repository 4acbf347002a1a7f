"""Build and check the distributions of the current commit, and show how to publish them; `make release` runs this.

It uploads nothing. What is built is a fresh clone, so that files without a commit cannot get in, and with the tools of
a virtual environment of its own: pyproject.toml's group `release`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from make_venv import run

ROOT = Path(__file__).resolve().parent
WORK, DIST = ROOT / "build" / "release", ROOT / "dist"


def problem_of(version: str) -> str | None:
    """Return one sentence that says why this commit is no release, and what to do; None if it is one."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return f"a release is built of a commit, and {ROOT} is no git clone; clone the repository with git"
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    if changed.stdout:
        first = changed.stdout.decode().splitlines()[0].split(maxsplit=1)[1]
        return f"there are changes without a commit, such as {first}; commit or stash them: git status"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = r"Unreleased\]" if "dev" in version else rf"{re.escape(version)}\] - \d{{4}}-\d\d-\d\d"
    if not re.search(rf"^## \[{heading}$", changelog, re.M):
        return f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; write it, or change flatout/__init__.py"
    return None


def build(source: Path) -> list[Path]:
    """Build sdist and wheel of each distribution of a clone into `dist`, and check them."""
    python = str(WORK / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--no-input", "install", "--disable-pip-version-check"]
    run("Making an environment for the tools", [sys.executable, "-m", "venv", str(WORK / "venv")])
    # pip knows groups since 25.1
    run("Updating pip", [*pip, "-c", str(ROOT / "constraints.txt"), "-U", "pip"])
    run("Installing the tools", [*pip, "--group", f"{source / 'pyproject.toml'}:release"])
    for folder in (source, source / "migrate", source / "migrate" / "names"):
        name = f"Building {folder.relative_to(source.parent)}, first the sdist and from it the wheel"
        run(name, [python, "-m", "build", "--outdir", str(DIST), str(folder)])
    made = sorted(DIST.iterdir())
    wheels = [str(path) for path in made if path.suffix == ".whl"]
    run("Checking the metadata", [python, "-m", "twine", "check", "--strict", *map(str, made)])
    run("Checking the contents", [python, "-m", "check_wheel_contents", *wheels])
    return made


def main() -> int:
    """Build, check and show. Returns the exit status."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "flatout" / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert found is not None
    version = found[1]
    problem = problem_of(version)
    if problem:
        print(f"make: {problem}", file=sys.stderr)
        return 2
    for folder in (WORK, DIST):
        shutil.rmtree(str(folder), ignore_errors=True)
    source = WORK / "flatout"
    run("Cloning this commit", ["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(source)])
    made = build(source)
    print(f"\nflatout {version} is in dist/:")
    for path in made:
        data = path.read_bytes()
        print(f"  {path.name}  {len(data) / 1e3:,.0f} kB\n    sha256 {hashlib.sha256(data).hexdigest()}")
    print(f"""
Nothing was uploaded. To publish it:
  git tag -a v{version} -m 'flatout {version}'
  git push origin v{version}
  {WORK.relative_to(ROOT)}/venv/bin/twine upload dist/*""")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("make: stopped")
