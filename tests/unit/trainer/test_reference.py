"""The reference: computed once before step 0, equal to the bit at step 0, kept for other runs, resumed when killed."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from unit_store import write_units
from warm_process import start_python

from flatout.cli.main import main
from flatout.config.objective import REFERENCE
from flatout.config.read import dump_config, make_config
from flatout.config.schema import Config
from flatout.data import registry, token_store
from flatout.data.add_column import add_column
from flatout.data.reference_column import column_of_key, keep_on_disk, with_reference
from flatout.data.token_store import TokenStore
from flatout.errors import CheckpointError, DataError, FlatoutError, ProblemsError, UsageError
from flatout.io import file_lock
from flatout.parallel.control_group import ControlGroup
from flatout.track.callback import MemoryCallback
from flatout.trainer.run import train
from flatout.verifier.run import verify
from tests.conftest import read_metrics
from tests.usual import usual

# pairs, of which about half share a prompt of 70 tokens
NUM_PAIRS = 12


@pytest.fixture
def root(tiny, tmp_path):
    """The root of a data set of pairs of which nothing is known yet."""
    write_units(tmp_path, tiny.model_dir, [2] * NUM_PAIRS, name="pairs")
    return tmp_path


def config_of(tiny: Any, root: Path, name: str, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "run_dir": str(root / name),
        "device": "cpu",
        "model": {"name": str(tiny.model_dir), "precision": "fp32"},
        "data": {"name": "pairs", "root": str(root)},
        "objective": "dpo",
        "optim": {"lr": 1e-3},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": None},
    }
    for key, section in sections.items():
        values[key] = {**values[key], **section} if isinstance(values.get(key), dict) else section
    values["eval"] = {"prompts": [], **sections.get("eval", {})}
    values["batch"] = {"samples_per_step": 4, "max_steps": 3, "micro_batch_tokens": 300, **sections.get("batch", {})}
    if values.get("method") != "full":
        values["lora"] = {"rank": 4, "alpha": 8, **sections.get("lora", {})}
    return make_config(values)


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """A trained adapter, and the record of the first step of its run."""
    root = tmp_path_factory.mktemp("adapter")
    write_units(root, tiny.model_dir, [2] * NUM_PAIRS, name="pairs")
    train(config_of(tiny, root, "run", optim={"lr": 1e-2}))
    return root / "run" / "final", read_metrics(root / "run")[0]


def columns_of(root: Path) -> dict[str, np.ndarray]:
    """What is kept of references, by the column's name."""
    store = TokenStore.open(registry.built_dir(root, "pairs"))
    return {name: np.array(own) for name, own in store.extra.items() if name.startswith("reference_")}


def trained(config: Config) -> list[str]:
    """Train, and return what was said about the reference."""
    recorder = MemoryCallback()
    train(config, callbacks=[recorder])
    return [text for _, name, text in recorder.stages if name == "reference"]


def with_other_weights(model_dir: Path, copy: Path) -> Path:
    """A copy of a model folder with one weight changed."""
    shutil.copytree(model_dir, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


MODELS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"method": "full"},
    "4 bits": {"base": {"storage": "nf4"}},
    "rows": {"batch": {"layout": "rows"}},
    "bf16": {"model": {"precision": "bf16"}},
}


@pytest.mark.parametrize("model", usual(MODELS, ["lora", "4 bits"]))
def test_step_0_is_its_reference_to_the_bit(tiny, root, metrics_of, model):
    config = config_of(tiny, root, "run", eval={"fraction": 0.2, "every_steps": 1}, **MODELS[model])
    trained(config)
    first, second, *_ = metrics_of(root / "run")
    at_start, *_ = metrics_of(root / "run", "eval")
    assert first["num_micro_batches"] > 1
    assert at_start["step"] == 0
    for metrics, loss in ((first["metrics"], first["loss"]), (at_start["metrics"], at_start["eval_loss"])):
        assert loss == pytest.approx(math.log(2), rel=1e-15)
        assert [metrics[f"rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")] == [0.0] * 4
    assert second["metrics"]["rewards/margins"] != 0


def test_what_another_run_kept_meanwhile_changes_no_plan(root):
    """Only one rank keeps values: what it reads from disk then must not decide which passes it takes."""
    store = with_reference(TokenStore.open(root / "built_dataset" / "pairs"))
    other = with_reference(TokenStore.open(store.folder))
    opened = TokenStore.open(store.folder)
    other.extra[REFERENCE][:] = -2.0
    keep_on_disk(other, "0" * 32, "other")
    store.extra[REFERENCE][0] = -1.0
    keep_on_disk(store, "0" * 32, "own")
    assert store.extra[REFERENCE][0] == -1.0
    assert np.isnan(store.extra[REFERENCE][1:]).all()
    kept = TokenStore.open(store.folder).extra[column_of_key("0" * 32)]
    assert kept.tolist() == [-1.0] + [-2.0] * (store.num_samples - 1)
    assert opened.num_samples == store.num_samples


def test_nodes_that_have_kept_different_values_lose_none_of_the_run_s(tiny, root, monkeypatch, metrics_of):
    """Held-out samples are looked for after the samples of training, in the same column."""
    gather = ControlGroup.all_gather

    def also_of_another_node(group: ControlGroup, value: Any) -> list[Any]:
        return [*gather(group, value), *(["another"] if isinstance(value, str) and len(value) == 32 else [])]

    monkeypatch.setattr(ControlGroup, "all_gather", also_of_another_node)
    train(config_of(tiny, root, "run", eval={"fraction": 0.25, "prompts": []}))
    first = metrics_of(root / "run")[0]
    assert (first["metrics"]["rewards/margins"], first["metrics"]["rewards/chosen"]) == (0, 0)


def test_a_data_set_keeps_the_newest_references(tiny, root, monkeypatch, metrics_of):
    monkeypatch.setattr("flatout.data.reference_column.MOST_KEPT", 2)
    for digit in "123":
        store = with_reference(TokenStore.open(registry.built_dir(root, "pairs")))
        store.extra[REFERENCE][:] = -float(digit)
        gone = keep_on_disk(store, digit * 32, f"by model {digit}")
    assert gone == ["by model 1"]
    assert columns_of(root).keys() == {column_of_key("2" * 32), column_of_key("3" * 32)}
    assert len(list(store.folder.glob("reference_*.npy"))) == 2
    said = trained(config_of(tiny, root, "run"))
    assert any("an older one was removed (by model 2)" in text for text in said)
    assert metrics_of(root / "run")[0]["metrics"]["rewards/margins"] == 0
    # what stays is whole, and used
    assert columns_of(root)[column_of_key("3" * 32)].tolist() == [-3.0] * store.num_samples
    (said_again,) = trained(config_of(tiny, root, "again"))
    assert "are known from an earlier run" in said_again


def test_runs_that_keep_references_at_once_drop_the_oldest(root, monkeypatch):
    """Another run replaces what it has kept, each time that this one has read the data set's list without its lock."""
    monkeypatch.setattr("flatout.data.reference_column.MOST_KEPT", 2)
    own, other = (with_reference(TokenStore.open(registry.built_dir(root, "pairs"))) for _ in range(2))
    for digit in "12":
        keep_on_disk(other, digit * 32, f"by model {digit}")
    opens, locks, busy, times = TokenStore.open, file_lock.locked, False, 0

    @contextmanager
    def locked(*given: Any) -> Iterator[None]:
        nonlocal busy
        was, busy = busy, True
        with locks(*given):
            yield
        busy = was

    def replaced_behind(folder: Path) -> TokenStore:
        nonlocal busy, times
        found = opens(folder)
        if not busy:
            busy, times = True, times + 1
            other.extra[REFERENCE][:] = -float(times)
            keep_on_disk(other, "1" * 32, f"by model 1, {times}")
            busy = False
        return found

    monkeypatch.setattr("flatout.data.add_column.locked", locked)
    monkeypatch.setattr(TokenStore, "open", replaced_behind)
    assert keep_on_disk(own, "9" * 32, "by model 9") == ["by model 2"]
    assert times
    assert columns_of(root).keys() == {column_of_key("1" * 32), column_of_key("9" * 32)}


def test_a_store_opens_while_a_column_is_replaced(root, monkeypatch):
    store = with_reference(TokenStore.open(root / "built_dataset" / "pairs"))
    keep_on_disk(store, "1" * 32, "own")
    read, times = token_store.read_manifest, 0

    def replaced_behind(folder: Path) -> Any:
        nonlocal times
        times += 1
        found = read(folder)
        if times == 1:
            monkeypatch.setattr(token_store, "read_manifest", read)
            store.extra[REFERENCE][0] = -1.0
            keep_on_disk(store, "1" * 32, "own")
        return found

    monkeypatch.setattr(token_store, "read_manifest", replaced_behind)
    assert TokenStore.open(store.folder).extra[column_of_key("1" * 32)][0] == -1.0
    assert times == 1
    (store.folder / f"{TokenStore.open(store.folder).columns[column_of_key('1' * 32)].file}").unlink()
    with pytest.raises(DataError, match=r"damaged|missing"):
        TokenStore.open(store.folder)


def test_a_start_says_how_far_a_kept_reference_is_from_its_own_rounding(tiny, root, metrics_of):
    bf16 = {"model": {"precision": "bf16"}}
    trained(config_of(tiny, root, "one", **bf16))
    (equal,) = trained(config_of(tiny, root, "equal", **bf16))
    assert equal.endswith("are known from an earlier run")
    assert metrics_of(root / "equal")[0]["metrics"]["rewards/margins"] == 0
    (other,) = trained(config_of(tiny, root, "other", **bf16, batch={"layout": "rows"}))
    first = metrics_of(root / "other")[0]["metrics"]
    assert first["rewards/margins"] != 0
    said = re.search(r"they differ by up to (\S+), so the rewards of step 1 are", other)
    assert said is not None, other
    # a reward is 0.1 of a difference
    assert abs(first["rewards/margins"]) <= 2 * 0.1 * 1.1 * float(said[1]) < 0.1


def test_a_second_run_pays_nothing_unless_what_decides_it_differs(tiny, root, adapter, metrics_of):
    other: dict[str, Any]
    (said,) = trained(config_of(tiny, root, "one"))
    assert f"{2 * NUM_PAIRS} log-probabilities in" in said
    kept = columns_of(root)
    for name, other in {
        "seed": {"seed": 9},
        "loss": {"optim": {"lr": 5e-4}, "objective": {"kind": "ipo", "beta": 0.3}, "batch": {"max_steps": 8}},
    }.items():
        (said,) = trained(config_of(tiny, root, name, **other))
        assert f"{2 * NUM_PAIRS} log-probabilities are known" in said, name
    assert {name: own.tolist() for name, own in columns_of(root).items()} == {
        name: own.tolist() for name, own in kept.items()
    }
    # another packing rounds in another way, and no more
    assert abs(metrics_of(root / "seed")[0]["loss"] - math.log(2)) < 1e-5
    for name, other in {
        "precision": {"model": {"precision": "fp64"}},
        "base": {"base": {"storage": "nf4"}},
        "adapter": {"lora": {"continue_from": str(adapter[0])}},
        "weights": {"model": {"name": str(with_other_weights(tiny.model_dir, root / "model"))}},
    }.items():
        (said,) = trained(config_of(tiny, root, name, **other))
        assert "log-probabilities in" in said, name
        assert metrics_of(root / name)[0]["metrics"]["rewards/margins"] == 0, name
    assert len(columns_of(root)) == 5
    # other tokens under the same name
    write_units(root, tiny.model_dir, [2] * NUM_PAIRS, name="pairs", unlabelled=None, seed=1)
    (said,) = trained(config_of(tiny, root, "tokens"))
    assert "log-probabilities in" in said
    assert not columns_of(root).keys() & kept.keys()


def test_only_what_a_run_needs_is_computed_and_the_rest_later(tiny, root):
    (said,) = trained(config_of(tiny, root, "short", batch={"max_steps": 1}))
    assert "8 log-probabilities in" in said
    (values,) = columns_of(root).values()
    assert np.isnan(values).sum() == 2 * NUM_PAIRS - 8
    (said,) = trained(config_of(tiny, root, "long"))
    assert f"{2 * NUM_PAIRS - 8} log-probabilities in" in said
    assert "8 were known" in said
    (values,) = columns_of(root).values()
    assert (values < 0).all()


KILLED = """
import os, signal, sys
import flatout
class Kill(flatout.Callback):
    def on_phase(self, name, done=0, total=0):
        if name == "computing the reference" and done >= 8:
            os.kill(os.getpid(), signal.SIGKILL)
flatout.train(sys.argv[1], callbacks=[Kill()])
"""


def test_a_killed_pass_goes_on_to_the_bit(tiny, tmp_path, metrics_of):
    batch = {"samples_per_step": 2, "max_steps": 6}
    for name in ("whole", "parts"):
        root = tmp_path / name
        write_units(root, tiny.model_dir, [2] * NUM_PAIRS, name="pairs")
        config = config_of(tiny, root, "run", batch=batch)
        if name == "parts":
            (root / "run.yaml").write_text(dump_config(config, only_given=True))
            (root / "kill.py").write_text(KILLED)
            killed = start_python([str(root / "kill.py"), str(root / "run.yaml")], root / "log")
            assert killed.wait(600) == -signal.SIGKILL, (root / "log").read_text()
            (found,) = columns_of(root).values()
            assert 0 < (found < 0).sum() <= 8
        (said,) = trained(config)
        assert ("were known" in said) == (name == "parts")
    whole, parts = (columns_of(tmp_path / name) for name in ("whole", "parts"))
    assert {name: own.tolist() for name, own in whole.items()} == {name: own.tolist() for name, own in parts.items()}
    losses = [[line["loss"] for line in metrics_of(tmp_path / name / "run")] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_a_resumed_run_has_the_reference_of_step_0(tiny, root, metrics_of):
    trained(config_of(tiny, root, "run", batch={"max_steps": 2, "samples_per_step": 3}))
    (before,) = columns_of(root).values()
    # the rest of the epoch is needed now, and training has moved the model
    allowed = {"checkpoint": {"allow_change": ["batch.max_steps"]}}
    trained(config_of(tiny, root, "run", batch={"max_steps": 4, "samples_per_step": 3}, **allowed))
    (after,) = columns_of(root).values()
    assert np.isnan(before).any()
    assert (after[before < 0] == before[before < 0]).all()
    write_units(root / "fresh", tiny.model_dir, [2] * NUM_PAIRS, name="pairs")
    fresh = config_of(tiny, root / "fresh", "run", batch={"max_steps": 4, "samples_per_step": 3})
    trained(fresh)
    (expected,) = columns_of(root / "fresh").values()
    assert np.array_equal(after, expected, equal_nan=True)


def test_another_adapter_can_be_the_reference(tiny, root, adapter, metrics_of):
    folder, fresh = adapter
    trained(config_of(tiny, root, "continued", lora={"continue_from": str(folder)}))
    trained(config_of(tiny, root, "other", objective={"kind": "dpo", "reference": {"adapter": str(folder)}}))
    continued, other = (metrics_of(root / name)[0] for name in ("continued", "other"))
    # the model that is trained is not the reference
    assert other["metrics"]["logps/chosen"] == fresh["metrics"]["logps/chosen"]
    assert other["metrics"]["rewards/margins"] != 0
    moved = continued["metrics"]["logps/chosen"] - fresh["metrics"]["logps/chosen"]
    assert other["metrics"]["rewards/chosen"] == pytest.approx(-0.1 * moved, rel=1e-5)


def test_a_run_resumes_only_with_the_reference_that_it_had(tiny, root, adapter):
    own = root / "adapter"
    shutil.copytree(adapter[0], own)
    objective = {"kind": "dpo", "reference": {"adapter": str(own)}}
    trained(config_of(tiny, root, "run", objective=objective, batch={"max_steps": 1}))
    longer: dict[str, Any] = {"checkpoint": {"allow_change": ["batch.max_steps"]}, "objective": objective}
    trained(config_of(tiny, root, "run", **longer, batch={"max_steps": 2}))
    weights = own / "adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(CheckpointError, match=r"- objective: .* in the checkpoint"):
        trained(config_of(tiny, root, "run", **longer, batch={"max_steps": 3}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": {"kind": "dpo", "reference": {"update_every": 10}}}, "update_every: a reference that follows"),
        ({"objective": {"kind": "dpo", "sync_ref_model": True}}, "objective.sync_ref_model: a reference that follows"),
        ({"objective": {"kind": "simpo", "reference": {"adapter": "a"}}}, "no effect with objective simpo, which has"),
        (
            {"method": "full", "objective": {"kind": "dpo", "reference": {"adapter": "a"}}},
            "objective.reference.adapter has no effect with method: full",
        ),
        ({"objective": {"kind": "dpo", "reference": {"adapter": "nowhere"}}}, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused(tiny, root, sections, said):
    with pytest.raises((UsageError, ProblemsError, FlatoutError), match=said):
        train(config_of(tiny, root, "run", **sections))


def test_a_column_of_that_name_cannot_be_written(tiny, root):
    store = TokenStore.open(registry.built_dir(root, "pairs"))
    values = np.zeros(store.num_samples)
    with pytest.raises(UsageError, match="reference_logprob: runs compute it"):
        add_column(store.folder, "reference_logprob", values, per="sample", meaning="mine")
    stored = add_column(store.folder, "ref_logprob", values, per="sample", meaning="mine")
    assert "mine" in stored.columns["ref_logprob"].meaning


KEPT = "the reference that a run has kept"


@pytest.mark.parametrize("model", ["lora", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_verify_proves_the_loss_and_that_step_0_is_its_reference(tiny, root, model, monkeypatch):
    """And that what a run has kept, which training reads, is what verify finds."""
    config = config_of(tiny, root, "run", batch={"micro_batch_tokens": 1000}, **MODELS[model])
    rows, _ = verify(config, num_ranks=1)
    found = {row.case: row for row in rows}
    assert {row.verdict for row in rows} == {"ok"}
    assert found["rewards before the first update"].worst_difference == 0
    assert sum("micro-batches" in case for case in found) >= 1
    assert KEPT not in found
    train(config)
    again = config.model_copy(update={"run_dir": root / "verify"})
    (row,) = [row for row in verify(again, num_ranks=1)[0] if row.case == KEPT]
    assert row.verdict == "ok"
    # each sample has its neighbour's, and the run's own is not the model's
    store = with_reference(TokenStore.open(registry.built_dir(root, "pairs")))
    ((name, values),) = columns_of(root).items()
    store.extra[REFERENCE][:] = np.where(np.isnan(values), np.nan, np.roll(values, 1))
    keep_on_disk(store, name.removeprefix("reference_"), "shifted")
    monkeypatch.setattr("flatout.verifier.own_rows.compute_step", lambda run, step: None)
    failed = {row.case: row for row in verify(again, num_ranks=1)[0] if row.verdict == "FAIL"}
    assert failed.keys() == {KEPT, "rewards before the first update"}
    assert failed[KEPT].worst_parameter


@pytest.mark.parametrize("dropout", usual([0.0, 0.1], [0.1]))
def test_verify_says_where_a_reference_is_not_that_of_training_to_the_bit(tiny, root, dropout):
    """A model with dropout computes its reference by the kernels of evaluation."""
    shutil.copytree(tiny.model_dir, root / "model")
    facts = json.loads((root / "model" / "config.json").read_text())
    (root / "model" / "config.json").write_text(json.dumps(facts | {"attention_dropout": dropout}))
    config = config_of(tiny, root, "run", model={"name": str(root / "model")}, batch={"micro_batch_tokens": 1000})
    rows, _ = verify(config, num_ranks=1)
    (row,) = [row for row in rows if row.case == "rewards before the first update"]
    assert (row.verdict, bool(row.note)) == (("left out", True) if dropout else ("ok", False)), row
    assert not [row for row in rows if row.verdict == "FAIL"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        *(pytest.param(["gpus=[0,1]", f"strategy={name}"], marks=pytest.mark.exhaustive) for name in ("ddp", "zero3")),
    ],
)
def test_rows_of_pairs_train_from_the_command_line(tiny, tmp_path, capfd, metrics_of, more):
    rows = [
        {"prompt": f"What is {a} and {a}?", "chosen": f"It is {2 * a}.", "rejected": "I cannot say that."}
        for a in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        f"device: cpu\nmodel: {{name: '{tiny.model_dir}', precision: fp32}}\nobjective: dpo\n"
        f"data: {{name: pairs, root: '{tmp_path}', sources: [{{path: '{tmp_path}/pairs.jsonl'}}], template: qwen3}}\n"
        "batch: {samples_per_step: 4}\neval: {fraction: 0.25, every_steps: 1, best: rewards/accuracies}\n"
    )
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert "forward passes over 2 steps before step 0" in " ".join(capfd.readouterr().out.split())
    for name, said in (("one", "12 log-probabilities in"), ("two", "12 log-probabilities are known")):
        assert main(["train", str(tmp_path / "run.yaml"), f"run_dir={tmp_path / name}", f"name={name}", *more]) == 0
        assert f"pairs: {said}" in " ".join((tmp_path / name / "train.log").read_text().split())
        first, *_ = metrics_of(tmp_path / name)
        assert abs(first["metrics"]["rewards/margins"]) <= (1e-6 if "strategy=zero3" in more else 0)
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert "rewards/margins" in (tmp_path / "one" / "train.log").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["lora", "full", "4 bits", "bf16"])
def test_step_0_is_its_reference_to_the_bit_on_a_gpu(tiny, root, metrics_of, model):
    """As on the CPU, with compiled layers, shared prompts and, where they pay, CUDA graphs."""
    trained(config_of(tiny, root, "run", device="cuda", deterministic=True, **MODELS[model]))
    first, *_ = metrics_of(root / "run")
    assert [first["metrics"][f"rewards/{name}"] for name in ("chosen", "rejected", "margins")] == [0.0] * 3
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-15)


def test_a_reference_has_no_dropout(tiny, root, adapter):
    """Plain transformers in eval mode is the judge; the passes of training would be off by 1e-2 and more."""
    shutil.copytree(tiny.model_dir, root / "model")
    facts = json.loads((root / "model" / "config.json").read_text())
    (root / "model" / "config.json").write_text(json.dumps(facts | {"attention_dropout": 0.3}))
    folder, name, known = str(adapter[0]), str(root / "model"), set(columns_of(root))
    train(config_of(tiny, root, "run", model={"name": name}, lora={"continue_from": folder, "dropout": 0.5}))
    (kept,) = [values for name, values in columns_of(root).items() if name not in known]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(name), folder).eval()
    store = TokenStore.open(registry.built_dir(root, "pairs"))
    compared = 0
    for index in np.flatnonzero(~np.isnan(kept)):
        sample = store.sample(int(index))
        ids, mask = torch.tensor(sample.token_ids.astype(np.int64)), torch.tensor(sample.loss_mask.astype(bool))
        with torch.no_grad():
            logprobs = plain(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        expected = logprobs.gather(-1, ids[1:, None])[:, 0][mask[1:]].sum()
        assert kept[index] == pytest.approx(float(expected), rel=1e-4)
        compared += 1
    assert compared >= 8
