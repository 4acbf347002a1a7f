"""A host without memory is one sentence and exit code 6; a small file needs little."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flatout.config.folders import run_identity

# what is imported counts; only what comes after does not fit
LIMITED = """
import resource, sys
from pathlib import Path
from flatout.cli.main import main
from flatout.io.json_file import read_json
import flatout.cli.report, flatout.view.open_runs, flatout.view.page, flatout.view.facts, flatout.view.report
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + ({mib} << 20),) * 2)
{run}
"""


def limited(run: str, mib: int) -> subprocess.CompletedProcess[str]:
    code = LIMITED.format(run=run, mib=mib)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)


def test_a_small_json_file_needs_no_64_mib(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}')
    done = limited(f"print(read_json(Path({str(tmp_path / 'a.json')!r})))", mib=32)
    assert done.stdout == "{'a': 1}\n", done.stderr


@pytest.mark.parametrize(("mib", "code"), [(24, 6), (4096, 0)])
def test_too_little_memory_is_one_sentence(tmp_path, mib, code):
    run_identity(tmp_path)
    (tmp_path / "config.yaml").write_text("name: long\n")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "note", "why": "a" * (48 << 20)}) + "\n")
    done = limited(f"sys.exit(main(['report', {str(tmp_path)!r}, '--format', 'md']))", mib=mib)
    assert done.returncode == code, done.stderr
    if code:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: the host has too little memory")
        assert "ulimit -v" in line
