"""The playbooks of docs/extending.md, each done once."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.data.build import open_or_build
from flatout.track.callback import Callback
from flatout.track.record import EvalRecord, RunEnd, RunStart, StepRecord
from flatout.track.tracker import Tracker, parameters
from flatout.track.trackers import TRACKERS
from flatout.trainer.run import train

ROOT = Path(__file__).parents[2]


class PlaybookConfig(LlamaConfig):
    model_type = "playbook_llama"


class PlaybookForCausalLM(LlamaForCausalLM):
    config_class = PlaybookConfig


def test_a_new_dense_architecture_needs_no_row(tiny, tmp_path, metrics_of):
    """A model type that flatout has never heard of trains, and its first loss is that of transformers."""
    AutoConfig.register("playbook_llama", PlaybookConfig)
    AutoModelForCausalLM.register(PlaybookConfig, PlaybookForCausalLM)
    folder = tmp_path / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source := tiny.model_dir / name).exists():
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
    torch.manual_seed(0)
    config = PlaybookConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    model = PlaybookForCausalLM(config).double()
    model.save_pretrained(folder)
    run_config = tiny.config(tmp_path / "run", model={"name": str(folder), "precision": "fp64"}, batch={"max_steps": 1})
    train(run_config)
    first = metrics_of(tmp_path / "run")[0]

    store = open_or_build(run_config.data, str(folder))
    losses, num_labels = [], 0
    for index in range(store.num_samples):
        ids, mask = (torch.from_numpy(array.copy()) for array in store.sample(index).pair)
        labels = ids.long().masked_fill(~mask, -100)[1:]
        logits = model(ids.long()[None]).logits[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100))
        num_labels += int(mask[1:].sum())
    assert num_labels == int(store.num_label_tokens.sum())
    # the step holds six of these samples: its loss is the mean over their label tokens
    per_sample = torch.stack([each.sum() for each in losses])
    sums = [float(per_sample[list(ids)].sum()) for ids in [step_ids(run_config)]]
    assert first["loss"] == pytest.approx(sums[0] / first["num_label_tokens"], rel=1e-10)


def step_ids(config: Any) -> tuple[int, ...]:
    from flatout.parallel.rank import Rank
    from flatout.track.callback import Reporter
    from flatout.trainer.planned_run import open_and_plan

    return open_and_plan(config, Reporter(), Rank()).plan.step(0).sample_ids


def test_every_kernel_has_a_plain_twin_and_a_test_that_compares_them():
    tests = {path: path.read_text() for path in (ROOT / "tests" / "parity").glob("test_*.py")}
    # how operators are registered and CUDA sources compiled, not one of them
    others = ("__init__", "__pycache__", "operators", "cuda_source")
    operations = [path for path in (ROOT / "flatout" / "kernels").iterdir() if path.stem not in others]
    assert len(operations) >= 5
    for path in operations:
        twins = (path, path / "reference.py", path / "__init__.py")
        twin = next(file for file in twins if file.is_file())
        assert ast.get_docstring(ast.parse(twin.read_text())), f"{path.stem}: the plain twin says what it computes"
        assert any(f"flatout.kernels.{path.stem}" in text for text in tests.values()), f"{path.stem}: no parity test"


def test_a_row_format_is_one_function_in_a_file_of_its_own(tiny, tmp_path):
    converter = tmp_path / "riddles.py"
    converter.write_text(
        "def rows(row):\n"
        '    turns = [{"role": "user", "content": row["riddle"]}, {"role": "assistant", "content": row["solution"]}]\n'
        '    return {"messages": turns}\n'
    )
    rows = tmp_path / "riddles.jsonl"
    rows.write_text("".join(json.dumps({"riddle": f"what is {n}", "solution": f"it is {n}"}) + "\n" for n in range(3)))
    data = tiny.config(tmp_path / "run").data.model_copy(
        update={"name": "riddles", "root": tmp_path / "data", "num_procs": 1, "sources": []}
    )
    data = type(data).model_validate(
        {**data.model_dump(), "sources": [{"path": str(rows), "format": f"{converter}:rows"}]}
    )
    store = open_or_build(data, str(tiny.model_dir))
    assert store.num_samples == 3
    assert int(store.num_label_tokens.sum()) > 0


GREET = """
from flatout.api import Verb
from flatout.errors import Fix, UsageError

def arguments(parser):
    parser.add_argument("name")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--loud", action="store_true")

def run(args):
    if args.name == "nobody":
        raise UsageError("nobody is there", [Fix({"--loud": True}, "calls")])
    print(f"hello {args.name}", args.words, args.loud)
    return 0

VERB = Verb("greet", "Use", "greet somebody", arguments, run, "you --loud", takes_overrides=True, needs_file=True)
"""


def test_a_verb_is_one_value_and_one_entry_point(tmp_path, monkeypatch, capsys):
    (tmp_path / "greeting.py").write_text(GREET)
    installed = tmp_path / "greeting-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[flatout.verbs]\ngreet = greeting:VERB\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["greet", "--loud", "you", "lora.rank=8"]) == 0
    assert capsys.readouterr().out == "hello you ['lora.rank=8'] True\n"
    assert main(["greet", "nobody"]) == 2
    assert "try --loud  # calls" in capsys.readouterr().err
    assert main(["greet", "you", "--lod"]) == 2
    assert "did you mean --loud?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "  greet     greet somebody\n" in capsys.readouterr().out
    assert main(["gret", "you"]) == 2
    assert "example: flatout greet you --loud" in capsys.readouterr().err
    (installed / "entry_points.txt").write_text("[flatout.verbs]\ntrain = greeting:run\n")
    assert main(["--help"]) == 2
    assert "train (greeting:run)" in capsys.readouterr().err


METRIC = '            "num_threads": threading.active_count(),\n'
METRIC_ROW = """    num_threads: Annotated[int, Figure(
        "threads of a rank's process", "threads", ranks="max", measured="num_threads", line="{} threads",
        console=6, chart="Host threads", label="threads",
    )] = 0
"""


def test_a_metric_is_one_row_and_one_place_that_computes_it(tiny, tmp_path, metrics_of):
    """In a copy of the package, as the playbook says; everything that shows figures shows it."""
    shutil.copytree(ROOT / "flatout", tmp_path / "flatout", ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, new in (
        ("track/record.py", "    metrics: Mapping[str, float]", METRIC_ROW),
        ("trainer/rank_meter.py", "            **memory_bytes(self._device),", METRIC),
        ("trainer/rank_meter.py", "import time\n", "import threading\n"),
    ):
        path = tmp_path / "flatout" / file
        path.write_text(path.read_text().replace(before, new + before, 1))
    run, env = tmp_path / "run", {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(run, batch={"max_steps": 1})))
    code = f"""if True:
        import flatout
        from pathlib import Path
        from flatout.cli.main import main
        from flatout.track.run_log import read_run
        from flatout.track.tracker import metrics
        assert flatout.__file__.startswith({str(tmp_path)!r})
        assert main(["train", "run.yaml"]) == 0
        assert main(["report", "run"]) == 0
        print(metrics(read_run(Path({str(run)!r})).steps[0])["train/num_threads"])"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = metrics_of(run)
    assert line["num_threads"] >= 1
    words = f"{line['num_threads']} threads"
    assert words in done.stdout
    assert words in (run / "train.log").read_text()
    assert "Host threads" in (run / "report.html").read_text()
    assert done.stdout.splitlines()[-1] == str(line["num_threads"])


class Listener(Callback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.calls: list[str] = []
        self.events: list[str] = []

    def on_start(self, start: RunStart) -> None:
        self.calls.append(f"start of {start.plan.num_steps} steps")

    def on_stage(self, name: str, text: str) -> None:
        self.stages.append(name)

    def on_step(self, record: StepRecord) -> None:
        self.calls.append(f"step {record.step}")

    def on_eval(self, record: EvalRecord) -> None:
        self.calls.append(f"eval {record.step}")

    def on_save(self, step: int, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.calls.append(f"save {step}")

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.events.append(kind)

    def on_end(self, end: RunEnd) -> None:
        self.calls.append(end.outcome)


def test_a_callback_is_one_class(tiny, tmp_path):
    listener = Listener()
    train(tiny.config(tmp_path, batch={"max_steps": 2}, eval={"fraction": 0.1}), callbacks=[listener])
    assert {"config", "tokens", "plan", "model", "final"} <= set(listener.stages)
    assert listener.calls == ["start of 2 steps", "eval 0", "step 1", "step 2", "eval 2", "save 2", "complete"]
    assert "saved" in listener.events


class NoteTracker(Tracker):
    """Keeps its notes in a file."""

    def on_start(self, start: RunStart) -> None:
        super().on_start(start)
        self._notes: list[Any] = [["start", self.config.tags, parameters(start)["lora.rank"]]]

    def send(self, values: Mapping[str, float], step: int) -> None:
        self._notes.append([step, sorted(values)])

    def on_end(self, end: RunEnd) -> None:
        (self.folder / "all.json").write_text(json.dumps([*self._notes, ["end", end.outcome]]))


def test_a_tracker_is_one_class_and_one_row(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "notes", ("json", f"{__name__}.NoteTracker"))
    train(tiny.config(tmp_path / "run", batch={"max_steps": 1}, eval={"fraction": 0.1}))
    assert main(["track", str(tmp_path / "run"), "--to", "notes"]) == 0
    notes = json.loads((tmp_path / "run/trackers/all.json").read_text())
    assert notes[0] == ["start", [], 4]
    assert [note[0] for note in notes[1:]] == [0, 1, 1, "end"]
    assert "eval/loss" in notes[1][1]
    assert {"train/loss", "train/tokens_per_s", "train/lr"} <= set(notes[2][1])
