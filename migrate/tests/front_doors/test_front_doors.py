"""Every documented command, flag, class and snippet runs as written; run_manifest.py says how."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from run_manifest import MIGRATE, ROOT, Runner, judge, manifests
from warm_commands import WarmCommands

CASES = [
    pytest.param(system, name, marks=() if case.get("fast") else pytest.mark.exhaustive, id=f"{system}-{name}")
    for system, manifest in manifests().items()
    for name, case in manifest.cases.items()
]


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    root = tmp_path_factory.mktemp("doors")
    if sys.platform != "linux":
        return Runner(root)
    doors = ("hypersloth-build-dataset", "hypersloth-init", "hypersloth-train")
    (root / "warm").mkdir()
    torchrun = {"torchrun": ["-m", "torch.distributed.run"]}
    warm = WarmCommands(root / "warm", torchrun | {name: [str(root / "bin" / name)] for name in doors})
    return Runner(root, warm.folder)


@pytest.mark.parametrize(("system", "name"), CASES)
def test_what_is_documented_runs(system: str, name: str, runner: Runner) -> None:
    rows = judge(runner, system, name)
    wrong = [f"{row['kind']} {row['what']}: {row['result']}" for row in rows if row["result"] != row["expected"]]
    if wrong and all(": not run: " in line for line in wrong):
        pytest.skip(wrong[0])
    assert rows
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
def test_a_command_that_an_installed_original_has_too_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    # without the last option, pip removes the package from the environment that runs this test
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*install, "--prefix", tmp_path / "venv", MIGRATE], check=True)
    # flatout itself, and what it needs
    (site / "zz_test.pth").write_text(f"{ROOT}\n{Path(pytest.__file__).parents[1]}\n")

    metadata = site / "hypersloth-0.1.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hypersloth\nVersion: 0.1.1\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nhypersloth-train = HyperSloth:train\n")
    script = tmp_path / "venv" / "bin" / "hypersloth-train"
    code = (
        f"import sys\nsys.argv = [{str(script)!r}, 'x.py']\nimport flatout_migrate.doors as doors\ndoors.run_command()"
    )
    command = [tmp_path / "venv" / "bin" / "python", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "hypersloth-train is also a command of hypersloth 0.1.1" in done.stderr


def test_results_are_those_of_the_manifests() -> None:
    """benchmarks/results/front-doors.json has every row of the manifests, in the same words, and none that failed."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "front-doors.json").read_text())["rows"]
    assert not [row for row in measured if row["result"].startswith("failed")]
    keys = ("system", "kind", "what", "how", "expected")
    for door in {row["door"] for row in measured}:
        rows = [tuple(row[key] for key in keys) for row in measured if row["door"] == door]
        assert rows == [tuple(row[key] for key in keys) for row in manifests()[door].rows]
