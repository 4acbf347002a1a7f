"""The tables of what fits on which card are the planner's, and `flatout plan` gives their figures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import memory_table
import pytest
from bench.shapes import SHAPES

from flatout.cli.main import main
from flatout.demo.write import write_demo

ROOT = Path(__file__).parents[2]


def rows_of(text: str) -> dict[tuple[str, ...], list[str]]:
    """Return the lines of tables that begin with a model and a method, by both and the number of columns."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    rows = [cells for cells in lines if cells[0] in memory_table.MODELS and cells[1] in memory_table.METHODS]
    return {(cells[0], cells[1], str(len(cells))): cells[2:] for cells in rows}


def test_the_pages_have_the_planner_s_figures(capsys):
    memory_table.main()
    printed = capsys.readouterr().out
    planned, page = rows_of(printed), (ROOT / "docs" / "choose-a-model.md").read_text(encoding="utf-8")
    assert rows_of(page) == planned
    assert all(block in page for block in printed.strip().split("\n\n"))
    shown = rows_of(readme := (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(shown) >= 8
    assert shown.items() <= planned.items()
    assert {columns for _, _, columns in shown} == {str(2 + len(memory_table.CARDS))}
    assert f"| {' | '.join(memory_table.CARDS)} |" in readme


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, 1, num_train=200, num_held_out=1)
    return folder / "model"


@pytest.mark.parametrize(
    ("model", "method", "card", "settings"),
    [
        ("Qwen3-8B", "QLoRA", "8 GB", ["--device", "4090", "memory=7", "base.storage=nf4"]),
        ("Llama-3.1-8B", "LoRA", "24 GB", ["--device", "4090"]),
        ("Qwen3-4B", "full", "80 GB", ["--device", "h100", "method=full"]),
    ],
)
def test_the_command_gives_the_figure_of_the_table(
    model, method, card, settings,
    tokenizer, tmp_path, monkeypatch, capsys,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for file in tokenizer.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, "model")
    (Path("model") / "config.json").write_text(json.dumps(SHAPES[memory_table.MODELS[model]]))
    turns = [{"role": "user", "content": "What is 2 and 3?"}, {"role": "assistant", "content": "It is 5."}]
    Path("chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    # the folder has no weights, and memory is the same whatever they are
    Path("run.yaml").write_text("model: {name: model, init: random}\ndata: chats.jsonl\n")
    assert main(["plan", "run.yaml", *settings]) == 0
    line = re.search(r"^longest document +([\d,]+) tokens", capsys.readouterr().out, re.MULTILINE)
    assert line is not None
    tokens = int(line[1].replace(",", ""))
    assert tokens == memory_table.longest(model, method, memory_table.CARDS[card])
