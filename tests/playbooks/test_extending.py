"""The playbooks of docs/extending.md, each done once: a model, a kernel, a row format, a callback, a tracker."""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flatout.cli.main import main
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


def test_a_new_dense_architecture_needs_no_row(tiny: Any, tmp_path: Path, metrics_of: Any) -> None:
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
    from flatout.trainer.planned_run import plan_run

    return plan_run(config, Reporter(), Rank()).plan.step(0).sample_ids


def test_every_kernel_has_a_plain_twin_and_a_test_that_compares_them() -> None:
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


def test_a_row_format_is_one_function_in_a_file_of_its_own(tiny: Any, tmp_path: Path) -> None:
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


def test_a_callback_is_one_class(tiny: Any, tmp_path: Path) -> None:
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


def test_a_tracker_is_one_class_and_one_row(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "notes", ("json", f"{__name__}.NoteTracker"))
    train(tiny.config(tmp_path / "run", batch={"max_steps": 1}, eval={"fraction": 0.1}))
    assert main(["track", str(tmp_path / "run"), "--to", "notes"]) == 0
    notes = json.loads((tmp_path / "run/trackers/all.json").read_text())
    assert notes[0] == ["start", [], 4]
    assert [note[0] for note in notes[1:]] == [0, 1, 1, "end"]
    assert "eval/loss" in notes[1][1]
    assert {"train/loss", "train/tokens_per_s", "train/lr"} <= set(notes[2][1])
