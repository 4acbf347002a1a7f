"""The suite is only worth what it catches: every planted bug must make a test fail."""

import ast
import shutil
import subprocess
import sys

import pytest
from bugs import BUGS, ROOT, is_caught, plant


def test_every_bug_has_its_place(tmp_path):
    """Seconds instead of minutes: whoever changes such a place learns at once that its bug must follow."""
    shutil.copytree(ROOT / "flatout", tmp_path / "flatout", ignore=shutil.ignore_patterns("__pycache__"))
    for bug in BUGS:
        changed = plant(bug, tmp_path)
        compile(changed.read_bytes(), changed, "exec")
        before = (ROOT / changed.relative_to(tmp_path)).read_bytes()
        assert before != changed.read_bytes()
        changed.write_bytes(before)


def test_every_bug_names_a_function_of_a_test():
    """By its syntax: `-k` finds functions by a part of their names."""
    for bug in BUGS:
        file, _, wanted = bug.test.partition("::")
        names = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert any(name.startswith("test_") and wanted.partition("[")[0] in name for name in names), bug


@pytest.mark.exhaustive
def test_every_bug_has_its_test():
    files = sorted({bug.test.partition("::")[0] for bug in BUGS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-m", "not gpu", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for bug in BUGS:
        file, _, wanted = bug.test.partition("::")
        assert any(test.startswith(file) and wanted in test for test in listed), bug
        assert not wanted.endswith("]") or bug.test in listed, bug


# each bug takes a process and some 10 s: the first runs with the suite, the others with `make test-long`
CASES = [
    pytest.param(bug, id=bug.name, marks=() if index == 0 else pytest.mark.exhaustive) for index, bug in enumerate(BUGS)
]


@pytest.mark.parametrize("bug", CASES)
def test_a_planted_bug_is_caught(bug):
    assert is_caught(bug), f"{bug.test} passes with this bug: {bug.name}"
