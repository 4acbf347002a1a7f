"""KTO from rows with labels: the command on one and several ranks, resume, verify, and what is told and refused."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit_store import write_units

from flatout.cli.main import main
from flatout.config.objective import REFERENCE
from flatout.data import registry
from flatout.data.kl_pairs import make_kl_store
from flatout.data.reference_column import with_reference
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.objectives.kto import KTO
from tests.usual import usual

ROWS = [
    {
        "prompt": f"What is {k} and {k}? " * (k % 3 + 1),
        "completion": f"It is {2 * k}. " * (k % 4 + 1),
        "label": k % 3 > 0,
    }
    for k in range(15)
]


def written(tiny: Any, folder: Path, rows: list[dict[str, Any]], *, precision: str = "fp64", more: str = "") -> Path:
    """run.yaml over a file of rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        f"run_dir: {folder / 'run'}\ndevice: cpu\nmodel: {{name: '{tiny.model_dir}', precision: {precision}}}\n"
        f"data: {{name: judged, root: '{folder}', sources: [{{path: '{folder}/rows.jsonl'}}], template: qwen3}}\n"
        "objective: kto\nbatch: {samples_per_step: 4}\nschedule: {kind: constant, warmup_steps: 0}\n"
        "optim: {lr: 1.0e-2}\nlora: {rank: 4, alpha: 8}\neval: {fraction: 0.2, every_steps: 1, prompts: []}\n" + more
    )
    return folder / "run.yaml"


FIGURES = ("loss", "grad_norm", "metrics")


# test_losses.py has ranks with the suite
@pytest.mark.parametrize("more", [[], pytest.param(["two", "three"], marks=pytest.mark.exhaustive)], ids=["one", "all"])
def test_a_file_of_labels_trains_alike_on_any_number_of_ranks(tiny, tmp_path, metrics_of, capfd, more):
    file = written(tiny, tmp_path, ROWS)
    assert main(["plan", str(file)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "prompts with the answers to other prompts, about a half" in shown
    assert re.search(r"estimates \d+ tokens more, \d+\.\d%, in forward passes before gradients", shown)
    options = {
        "one": [],
        "cut": ["batch.micro_batch_tokens=90"],
        "two": ["gpus=[0,1]"],
        "three": ["gpus=[0,1,2]", "batch.layout=rows"],
    }
    runs = ("one", "cut", *more)
    for name in runs:
        assert main(["train", str(file), f"run_dir={tmp_path / name}", *options[name]]) == 0, name
        said = " ".join((tmp_path / name / "train.log").read_text().split())
        assert (
            f"judged, answers to other prompts: 12 log-probabilities {'in' if name == 'one' else 'are known'}" in said
        )
    steps, evaluated = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "one", "eval")
    for first in (steps[0] | {"metrics": steps[0]["metrics"]}, evaluated[0] | {"loss": evaluated[0]["eval_loss"]}):
        assert first["loss"] == 0.5
        assert {"kl", "rewards/chosen"} <= first["metrics"].keys()
        assert not any(value for name, value in first["metrics"].items() if not name.startswith("logps"))
    assert max(step["metrics"]["kl"] for step in steps) > 0
    assert metrics_of(tmp_path / "cut")[0]["num_micro_batches"] > 2
    for name in runs[1:]:
        for one, other in zip(steps, metrics_of(tmp_path / name), strict=True):
            for figure in FIGURES:
                assert other[figure] == pytest.approx(one[figure], rel=1e-6, abs=1e-8), (name, one["step"], figure)
        for one, other in zip(evaluated, metrics_of(tmp_path / name, "eval"), strict=True):
            assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-7)
            assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("kind", usual(["kto", "dpo", "cpo"], ["kto", "cpo"]))
def test_forward_passes_are_in_the_plan_and_in_what_steps_achieve(tiny, tmp_path, metrics_of, capsys, kind):
    rows = ROWS
    if kind != "kto":
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "No."} for row in ROWS]
    file = written(tiny, tmp_path, rows)
    args = [str(file), f"objective={kind}", "batch.share_prefix=off", "batch.epochs=2", "--tokens-per-s", "10"]
    assert main(["plan", *args, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    store = TokenStore.open(registry.built_dir(tmp_path, "judged"))
    # each answer once, held-out ones too; for KTO also each prompt with the answer to another one
    once = int(store.lengths.sum()) + (int(make_kl_store(store).lengths.sum()) if kind == "kto" else 0)
    assert plan["num_reference_tokens"] == (0 if kind == "cpo" else once)
    assert (plan["num_estimate_tokens"] > 0) == (kind == "kto")
    assert main(["train", *args[:4]]) == 0
    achieved = sum(step["flops_per_s"] * step["step_s"] for step in metrics_of(tmp_path / "run"))
    assert plan["time_s"] == pytest.approx(plan["num_tokens"] / 10 * plan["flops"] / achieved)
    assert (plan["flops"] > 1.1 * achieved) == (kind != "cpo")
    assert main(["plan", *args]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("tokens in forward passes before step 0, unless an earlier" in shown) == (kind != "cpo")


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_verify_proves_it(tiny, tmp_path, ranks):
    file = written(tiny, tmp_path, ROWS, precision="fp32")
    assert main(["verify", str(file), "--ranks", str(ranks)]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "run" / "verify.json").read_text())["rows"]}
    assert rows["rewards before the first update"]["worst_difference"] == 0
    assert {"packed", "each sample alone"} <= rows.keys()
    assert ("zero3" in rows) == (ranks > 1)


def test_each_prompt_gets_the_answer_to_another(tiny, tmp_path):
    store = write_units(tmp_path, tiny.model_dir, [1] * 40, name="d", labels=[1, 0] * 20)
    other = make_kl_store(store)
    answers = other.answer_of
    assert answers is not None
    assert (answers != np.arange(40)).all()
    assert sorted(answers.tolist()) == list(range(40))
    assert (other.lengths <= store.lengths.max()).all()
    for index, answer in enumerate(answers.tolist()):
        (own, mask), (ids, marks) = store.sample(index).pair, store.sample(answer).pair
        first, start = mask.argmax(), marks.argmax()
        found, found_mask = other.sample(index).pair
        assert found[:first].tolist() == own[:first].tolist()
        assert found[first:].tolist() == ids[start:][: len(found) - first].tolist()
        assert found_mask.sum() == other.num_label_tokens[index] == found_mask[first:].sum() > 0
        assert len(found) == other.lengths[index]
    assert (make_kl_store(store).answer_of == answers).all()
    # the reference of these answers is their own, also where that of the data set is known
    known = with_reference(store)
    known.extra[REFERENCE][:] = -1.0
    assert np.isnan(make_kl_store(known).extra[REFERENCE]).all()
    assert (known.extra[REFERENCE] == -1.0).all()


def test_answers_to_an_equal_prompt_are_not_taken(tiny, tmp_path):
    rows = [{**row, "prompt": f"What is {k % 3}?"} for k, row in enumerate(ROWS)]
    file = written(tiny, tmp_path, rows)
    assert main(["plan", str(file)]) == 0
    store = TokenStore.open(registry.entry_dir(tmp_path, registry.find(tmp_path, "judged")))
    prompts = [ids[: mask.argmax()].tolist() for ids, mask in (store.sample(index).pair for index in range(15))]
    answers = make_kl_store(store).answer_of
    assert answers is not None
    assert all(prompts[index] != prompts[answer] for index, answer in enumerate(answers))


def test_long_rows_take_no_more_memory_than_short_ones(tiny, tmp_path):
    count, length = 400, 8192
    built = write_units(tmp_path, tiny.model_dir, [1] * count, name="d", labels=[1, 0] * (count // 2))
    ids = np.random.default_rng(0).integers(0, 9, (count, length)).astype(np.int32)
    ids[1::2, :4096] = ids[::2, :4096]  # two rows have each prompt
    masks = np.zeros((count, length), bool)
    masks[:, 4096:] = True
    store = replace(
        built, token_ids=ids.ravel(), loss_mask=masks.ravel(), offsets=np.arange(count + 1) * length,
        num_label_tokens=np.full(count, length - 4096),
    )  # fmt: skip
    tracemalloc.start()
    other = make_kl_store(store)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 60 << 20, f"{most:,}"
    assert other.prompt_tokens is not None
    assert set(other.prompt_tokens.tolist()) == {4096}
    assert other.answer_of is not None
    assert (other.answer_of // 2 != np.arange(count) // 2).all()


def test_one_row_has_no_other_answer(tiny, tmp_path):
    store = write_units(tmp_path, tiny.model_dir, [1], name="d", labels=[1])
    with pytest.raises(DataError, match="one row, but this objective compares it with the answer to another"):
        make_kl_store(store)


@pytest.mark.parametrize(
    ("settings", "totals", "said"),
    [
        ({}, (16, 12), None),
        ({"undesirable_weight": 2.0}, (30, 12), None),
        ({}, (12, 0), "all 12 answers are desirable, so nothing says what to avoid"),
        ({}, (0, 12), "all 12 answers are undesirable"),
        ({}, (10, 30), "is 0.33 times undesirable_weight x 30 undesirable ones; .* such as desirable_weight 3 to 4"),
        ({"desirable_weight": 3.0}, (20, 12), "is 5.00 times .* such as desirable_weight 0.6 to 0.8"),
    ],
)
def test_what_is_odd_about_labels_is_told(settings, totals, said):
    found = list(KTO(**settings).notes(dict(zip(("label", "undesirable"), totals, strict=True))))
    assert len(found) == (said is not None)
    if said is not None:
        assert re.search(said, found[0]), found


def test_a_set_with_one_label_trains_and_says_so(tiny, tmp_path, metrics_of, capsys):
    file = written(tiny, tmp_path, [{**row, "label": True} for row in ROWS])
    assert main(["train", str(file), "batch.max_steps=1"]) == 0
    assert "all 15 answers are desirable, so nothing says what to avoid" in " ".join(
        (tmp_path / "run" / "train.log").read_text().split()
    )
    (line,) = metrics_of(tmp_path / "run")
    assert line["metrics"].keys() >= {"rewards/chosen", "kl"}
    assert not line["metrics"].keys() & {"rewards/rejected", "rewards/margins"}
    # a figure over the answers that it lacks cannot choose a checkpoint
    assert main(["train", str(file), "eval.best=rewards/chosen", f"run_dir={tmp_path / 'chosen'}"]) == 0
    assert main(["train", str(file), "eval.best=rewards/margins", f"run_dir={tmp_path / 'margins'}"]) == 3
    assert "rewards/margins has no value on the evaluation data" in " ".join(capsys.readouterr().err.split())
    # learnt as ordinary rows too
    assert main(["train", str(file), "objective=cross_entropy", f"run_dir={tmp_path / 'sft'}"]) == 0


def test_the_objective_reads_labels_of_chats_too_and_refuses_rows_without(tiny, tmp_path, capsys, metrics_of):
    """A chat with a label, which may mean a class to others, needs no format; a wrong label of a first row is named."""

    def chat(row: Any, **label: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        return {"messages": turns, **label}

    refused = {
        r"rows\.jsonl:1: no column 'label', which format kto needs; columns found: prompt, chosen, rejected": [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "No."} for row in ROWS
        ],
        r"rows\.jsonl:1: no column 'label', which format kto needs; columns found: messages": [chat(r) for r in ROWS],
        r"rows\.jsonl:1: label is 'meh'": [{**ROWS[0], "label": "meh"}, *ROWS[1:]],
    }
    for said, rows in refused.items():
        assert main(["train", str(written(tiny, tmp_path, rows))]) == 3
        assert re.search(said, " ".join(capsys.readouterr().err.split()))
    losses = []
    for rows in (ROWS, [chat(row, label=row["label"]) for row in ROWS]):
        assert main(["train", str(written(tiny, tmp_path, rows)), "batch.max_steps=1", "--restart"]) == 0
        losses += [line["loss"] for line in metrics_of(tmp_path / "run")]
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_compiles_nothing_during_steps_and_begins_at_the_reference(tiny, tmp_path, metrics_of, precision):
    """As on the CPU, with compiled layers for both kinds of passes, over 15 steps of many sizes."""
    rows = [{**row, "completion": row["completion"] * (k % 5 + 1)} for k, row in enumerate(ROWS * 4)]
    file = written(tiny, tmp_path, [{**row, "prompt": f"{k}: {row['prompt']}"} for k, row in enumerate(rows)])
    more = ["device=cuda", "deterministic=true", f"model.precision={precision}", "eval={}"]
    assert main(["train", str(file), *more]) == 0
    first, *others = metrics_of(tmp_path / "run")
    assert first["loss"] == 0.5
    assert not any(value for name, value in first["metrics"].items() if not name.startswith("logps"))
    assert max(step["metrics"]["kl"] for step in others) > 0
    assert '"kind": "compiled"' not in (tmp_path / "run" / "events.jsonl").read_text()
