"""The notebook, cell by cell, on the tiny model."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import flatout

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "train.ipynb"


def test_every_cell_of_the_notebook_runs(tiny, tmp_path, monkeypatch):
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


def outputs_of(client: Any, cell: str) -> list[dict[str, Any]]:
    """Run a cell in the kernel as a notebook does; return its outputs, each as it is in the end."""
    found: dict[str, dict[str, Any]] = {}
    client.execute(cell)
    while True:
        message = client.get_iopub_msg(timeout=600)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle" and found.get("busy"):
            return [one for name, one in found.items() if name != "busy"]
        if kind == "status":
            found["busy"] = {"is": True}
        elif kind in ("display_data", "update_display_data"):
            found[content["transient"].get("display_id") or f"output {len(found)}"] = content["data"]
        elif kind == "execute_result":
            found["result"] = content["data"]
        elif kind == "error":
            raise AssertionError("\n".join(content["traceback"]))
        elif kind == "stream":
            stream = found.setdefault(content["name"], {"text": ""})
            stream["text"] += content["text"]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [None, pytest.param([0, 1], marks=pytest.mark.exhaustive)])
def test_a_kernel_shows_one_bar_and_one_table(tiny, tmp_path, gpus):
    pytest.importorskip("ipykernel")
    from jupyter_client.manager import start_new_kernel

    cell = f"""
import flatout
run = flatout.train(
    model={str(tiny.model_dir)!r}, data={str(tiny.chats)!r}, device="cpu", gpus={gpus}, max_steps=45, lr=1e-3,
    samples_per_step=4, max_tokens=500, eval={{"fraction": 0.1, "prompts": [], "every_steps": 20}},
)
run
"""
    manager, client = start_new_kernel(cwd=str(tmp_path), startup_timeout=600)
    try:
        outputs = outputs_of(client, cell)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    shown = [one["text/html"] for one in outputs if "<progress" in one.get("text/html", "")]
    assert len(shown) == 1
    assert 'max="45" value="45"' in shown[0]
    rows = re.findall(r"<tr><td>([\d,]+)</td><td>([^<]*)</td><td>([^<]*)</td>", shown[0])
    assert 10 < len(rows) < 35
    log = flatout.load(tmp_path / "runs" / "run").log
    assert {int(step): loss for step, loss, _ in rows if loss}[45] == f"{log.steps[-1].loss:.4f}"
    assert [int(step) for step, _, evaluated in rows if evaluated] == [one.step for one in log.evals]
    assert "<summary>start</summary>" in shown[0]
    assert "samples, " in shown[0].split("<table>")[0]
    texts = "".join(one.get("text", "") for one in outputs)
    assert "%|" not in texts  # a bar of a library
    assert "samples, " not in texts  # a line of the run beside its output
    result = next(one["text/html"] for one in outputs if "<progress" not in one.get("text/html", "<progress"))
    assert "Best evaluation loss" in result
    assert "flatout chat" in result
