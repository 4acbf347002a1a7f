"""The notebook, cell by cell, on the tiny model."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "train.ipynb"


def test_every_cell_of_the_notebook_runs(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_NOTEBOOK_MODEL", str(tiny.model_dir))
    shown: list[Any] = []
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = [line for line in cell["source"] if not line.strip().startswith("%")]
        tree = ast.parse("".join(lines) + "\n")
        # as a notebook does, show the value of the last line
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names))  # noqa: S307  (our own notebook)
    run = names["run"]
    assert run.log.end.outcome == "complete"
    assert run.log.steps[-1].loss < run.log.steps[0].loss
    assert any("<iframe" in getattr(one, "_repr_html_", str)() for one in shown)
    assert any(isinstance(one, int) and one > 0 for one in shown)
    assert shown[-1].startswith("vllm serve served")
