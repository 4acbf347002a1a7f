"""Every example parses; transposed to a tiny model and tiny data in its own formats, it is planned by the command."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config, load_config
from flatout.config.schema import Config, SourceConfig
from flatout.demo.write import write_demo
from tests.usual import usual

FOLDER = Path(__file__).parents[2] / "examples"
# the index, losses, which the tests of objectives train with, and scripts
OTHERS = ("README.md", "dpo.py", "hinge.py", "lost_updates.py", "pictures_in_memory.py", "short_answers.py")
EXAMPLES = sorted(path for path in FOLDER.glob("*.*") if path.name not in OTHERS)
NUM_ROWS = 40


def row(format_name: str, source: SourceConfig, number: int) -> dict[str, Any]:
    question, answer = f"What is {number} and 1?", f"It is {number + 1}."
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if format_name == "alpaca":
        names = {"instruction": "instruction", "output": "output"} | source.columns
        return {names["instruction"]: question, names["output"]: answer}
    if format_name == "sharegpt":
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    return {"messages": turns}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    if file.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in values.values()) for values in rows)]
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(values) + "\n" for values in rows))


def on_tiny_data(config: Config, folder: Path, model_dir: Path) -> Config:
    sources = []
    for index, source in enumerate(config.data.sources):
        suffix = Path(source.path).suffix
        file = folder / f"rows-{index}{suffix if suffix in ('.csv', '.json') else '.jsonl'}"
        format_name = "messages" if source.format == "auto" else source.format
        write_rows(file, [row(format_name, source, number) for number in range(NUM_ROWS)])
        sources.append(source.model_copy(update={"path": str(file)}))
    data = config.data.model_copy(update={"sources": sources, "root": folder / "data", "num_procs": 1})
    # more rows than there are cannot be drawn
    data = data.model_copy(update={"num_samples": NUM_ROWS if data.num_samples else None})
    model = config.model.model_copy(update={"name": str(model_dir), "init": "random"})
    return config.model_copy(update={"data": data, "model": model, "run_dir": folder / "run"})


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, 1, num_train=200, num_held_out=1)
    return folder / "model"


def test_the_index_names_every_example():
    index = (FOLDER / "README.md").read_text()
    missing = [path.name for path in FOLDER.glob("*") if f"`{path.name}" not in index and path.name != "README.md"]
    assert not missing


def test_there_are_examples():
    assert sum(path.suffix == ".yaml" for path in EXAMPLES) >= 6
    assert sum(path.suffix == ".py" for path in EXAMPLES) == 1


@pytest.mark.parametrize("path", usual(EXAMPLES, EXAMPLES[::4]), ids=lambda path: path.name)
def test_example_is_planned(path, tiny_model, tmp_path, capsys):
    config = on_tiny_data(load_config(path), tmp_path, tiny_model)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["plan", str(tmp_path / "run.yaml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_steps"] >= 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_says_what_it_is_for_and_names_its_run(path):
    assert path.read_text().startswith(("# ", '"""'))
    assert load_config(path).name != "run"


@pytest.mark.exhaustive
def test_lost_updates_shows_the_figures_of_its_page():
    done = subprocess.run(
        [sys.executable, FOLDER / "lost_updates.py"], capture_output=True, text=True, check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    figures = [float(line.rsplit(maxsplit=1)[1]) for line in done.stdout.splitlines()]
    page = (FOLDER.parent / "docs" / "one-rounding.md").read_text()
    table = page[page.index("| share of a small update") :].split("\n\n")[0].splitlines()[2:]
    assert figures == pytest.approx([float(line.split("|")[2].split()[0]) for line in table], abs=0.03)


def test_short_answers_makes_pairs_by_its_rule():
    script = runpy.run_path(str(FOLDER / "short_answers.py"))
    long, short, open_end = "Ice is 3.5 times as hard. It melts!", "Ice is frozen water.", "Ice is a solid that"
    assert [script["is_short"](answer) for answer in (long, short, open_end, f" {short}\n")] == [
        False,
        True,
        False,
        True,
    ]
    assert script["pairs_of"](["a", "b", "c", "d"], [long, short, open_end, "No. Ice is not."]) == [
        {"prompt": "a", "chosen": "Ice is 3.5 times as hard.", "rejected": long}
    ]
    asked = {text.format(topic) for topic in script["TOPICS"] for text in script["QUESTIONS"]}
    assert len(asked) == 4 * len(script["TOPICS"]) == 160
