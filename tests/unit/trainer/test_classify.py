"""Texts with labels: from rows to a model that transformers reads, against its own classification in fp64."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_losses import plain_update
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
)

from flatout.cli.main import main
from flatout.config.schema import Config
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, UsageError
from flatout.models.packed import flatten_samples, rows_of_positions
from flatout.models.scoring import last_position
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.run import train
from tests.usual import usual

WORDS = {"good": ["great", "fine", "well"], "bad": ["poor", "awful"], "so-so": ["some", "a bit of"]}
ROWS = [
    {"text": " ".join([*WORDS[label], "it was"][: k % 5 + 1]) + "." * (k % 3), "label": label}
    for k, label in enumerate([*WORDS, *WORDS, "bad", "good", "bad", *WORDS])
]
LR, PER_STEP, NUM_STEPS = 0.02, 4, 10
Plan = Callable[..., PlannedRun]


def folder_of(tiny: Any, root: Path, config: Any, *, pads: bool = True) -> Path:
    """A folder of another model with the tiny tokenizer; without `pads`, the tokenizer has no padding token."""
    sizes = {"vocab_size": json.loads((tiny.model_dir / "config.json").read_text())["vocab_size"]}
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    tokenizer.pad_token = tokenizer.pad_token if pads else None
    tokenizer.save_pretrained(root)
    config(**sizes).save_pretrained(root)
    return root


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[Callable[..., Any], bool]] = {
    "llama": (lambda **sizes: LlamaConfig(**HEADS, eos_token_id=2, **sizes), True),
    "llama, padded by its end token": (lambda **sizes: LlamaConfig(**HEADS, eos_token_id=2, **sizes), False),
    "gpt2": (lambda **sizes: GPT2Config(**GPT2, bos_token_id=None, eos_token_id=2, **sizes), True),
    "gemma2": (lambda **sizes: Gemma2Config(**HEADS, eos_token_id=2, **sizes), True),
}


@pytest.fixture
def config_of(tiny, tmp_path):
    def make(
        rows: list[dict[str, Any]],
        source: dict[str, Any] | None = None,
        *,
        file: str = "rows",
        run: str = "run",
        **sections: Any,
    ) -> Config:
        path = tmp_path / f"{file}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [{"path": str(path), **(source or {})}]
        data = {"name": file, "root": str(tmp_path / "data"), "sources": sources, **sections.pop("data", {})}
        config: Config = tiny.config(tmp_path / run, **{"objective": "classify", "data": data, **sections})
        return config

    return make


@pytest.fixture
def plan(config_of):
    return lambda *rows, **sections: open_and_plan(config_of(*rows, **sections), Reporter(), Rank())


# one that has a padding token, and one whose end token pads
@pytest.mark.parametrize("name", usual(MODELS, ["gpt2", "llama, padded by its end token"]))
def test_loss_and_gradients_are_those_of_transformers(tiny, tmp_path, metrics_of, config_of, plan, name):
    make, pads = MODELS[name]
    folder = folder_of(tiny, tmp_path / "model", make, pads=pads)
    sections: dict[str, Any] = {
        "method": "full",
        "model": {"name": str(folder), "precision": "fp64", "init": "random"},
        "batch": {"samples_per_step": PER_STEP, "max_steps": NUM_STEPS, "micro_batch_tokens": 32},
        "optim": {"name": "sgd", "lr": LR, "beta1": 0.0, "max_grad_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "data": {"max_tokens": None},
    }
    planned = plan(ROWS, **sections)
    store = planned.store
    still = {"optim": {**sections["optim"], "lr": 1e-30}, "batch": {**sections["batch"], "max_steps": 1}}
    train(config_of(ROWS, run="first", **{**sections, **still}))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first/final", dtype=torch.float64)
    train(config_of(ROWS, **sections))
    losses, right = [], 0.0
    for step in planned.plan.steps():
        found = [model(**_batch_of(store, sample_id)) for sample_id in step.sample_ids]
        loss = torch.stack([one.loss for one in found]).mean()
        labels = store.extra["class"][list(step.sample_ids)]
        right = float(np.mean([int(one.logits.argmax()) for one in found] == labels))
        losses.append(plain_update(model, loss, LR))
    lines = metrics_of(tmp_path / "run")
    assert max(line["num_micro_batches"] for line in lines) > 1
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-6)
    assert lines[-1]["metrics"] == {"accuracy": pytest.approx(right)}
    final = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/final", dtype=torch.float64)
    for parameter, own in final.named_parameters():
        assert torch.allclose(own, model.get_parameter(parameter), rtol=0, atol=1e-6), parameter
    assert final.config.id2label == dict(enumerate(sorted(WORDS)))
    # in one padded batch, as the written tokenizer pads it
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    end = tokenizer.eos_token
    batch = tokenizer([row["text"] + end for row in ROWS], return_tensors="pt", padding=True)
    alone = [final(**_batch_of(store, sample_id)).logits for sample_id in range(len(ROWS))]
    batch.pop("token_type_ids", None)
    assert torch.allclose(final(**batch).logits, torch.cat(alone), rtol=1e-6, atol=1e-9)


def _batch_of(store: TokenStore, sample_id: int) -> dict[str, Any]:
    ids = torch.tensor(store.sample(sample_id).token_ids.tolist())
    return {"input_ids": ids[None], "labels": torch.tensor([int(store.extra["class"][sample_id])])}


@pytest.mark.parametrize(
    ("config", "objective", "said"),
    [
        (lambda **sizes: LlamaConfig(**HEADS, **sizes), "classify", None),
        (lambda **sizes: GraniteConfig(**HEADS, **sizes), "cross_entropy", None),
        (
            lambda **sizes: GraniteConfig(**HEADS, **sizes),
            "classify",
            "no sequence classification for model type granite, so it cannot score",
        ),
        (
            lambda **sizes: ModernBertDecoderConfig(**SMALL, pad_token_id=0, **sizes),
            "classify",
            "has no linear `score` without a bias",
        ),
    ],
)
def test_models_without_a_score_are_refused(tiny, tmp_path, plan, config, objective, said):
    model = {"name": str(folder_of(tiny, tmp_path / "model", config)), "init": "random"}
    if said is None:
        assert plan(ROWS, model=model, objective=objective).plan.num_steps
        return
    with pytest.raises(UsageError, match=re.escape(said)):
        plan(ROWS, model=model, objective=objective)


CHAT = [{"role": "user", "content": "it was great"}, {"role": "assistant", "content": "so it was"}]
SAID = [{"from": "human", "value": "it was great"}, {"from": "gpt", "value": "so it was"}]
# the form -> row, settings of the source, and the same row in its plainest form
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "it was", "label": "a"}, {}, {"text": "it was"}),
    "own names": (
        {"review": "it was", "stars": "a"}, {"columns": {"text": "review", "label": "stars"}}, {"text": "it was"},
    ),
    "messages": ({"messages": CHAT, "label": "a"}, {}, {"messages": CHAT}),
    "ShareGPT": ({"conversations": SAID, "label": "a"}, {}, {"messages": CHAT}),
    "a prompt": ({"prompt": "it was great", "label": "a"}, {}, {"messages": CHAT[:1]}),
}  # fmt: skip


@pytest.mark.parametrize("form", usual(FORMS, ["own names", "ShareGPT"]))
def test_a_row_is_a_text_or_a_chat_whose_last_token_is_scored(tiny, plan, form):
    row, source, plain = FORMS[form]
    other = {**row, source.get("columns", {}).get("label", "label"): "b"}
    store = plan([row, other], source).store
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    ids = (
        [*tokenizer(plain["text"])["input_ids"], tokenizer.eos_token_id]
        if "text" in plain
        else tokenizer.apply_chat_template(plain["messages"], tokenize=True, return_dict=False)
    )
    assert store.meta.labels == ("a", "b")
    assert store.extra["class"].tolist() == [0, 1]
    for sample_id in (0, 1):
        sample = store.sample(sample_id)
        assert sample.token_ids.tolist() == list(ids)
        assert np.flatnonzero(sample.loss_mask).tolist() == [len(ids) - 1]


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        (["b", "a", "10"], ("10", "a", "b")),
        ([True, False, True], ("false", "true")),
        ([0.0, 1.0, 0.0], ("0", "1")),
        ([["b"], ["a"], ["b"]], ("a", "b")),
        ([[3], [1], [3]], ("1", "3")),
        ([["a", "b"], ["b", "c"]], "rows.jsonl:1: label is a list of 2; a label is a text or an integer"),
        ([0.5, 1.0, 0.0], "rows.jsonl:1: label is a number (0.5); a label is a text or an integer"),
        ([None, "a", "b"], "rows.jsonl:1: label is null"),
        (["a", "a", "a"], "every row has the label 'a': there is nothing to classify"),
    ],
)
def test_labels_are_numbers_by_value_and_texts_by_character(plan, labels, found):
    rows = [{"text": f"it was {k}", "label": label} for k, label in enumerate(labels)]
    if isinstance(found, tuple):
        store = plan(rows).store
        assert store.meta.labels == found
        alone = [label[0] if isinstance(label, list) else label for label in labels]
        given = [str(label).lower().removesuffix(".0") for label in alone]
        assert [found[number] for number in store.extra["class"]] == given
        return
    with pytest.raises(DataError, match=re.escape(found)):
        plan(rows)


def test_rows_of_several_labels_are_left_out_by_the_proposed_setting(plan):
    labels = [["a"], ["a", "b"], ["b"], []]
    rows = [{"text": f"it was {k}", "label": label} for k, label in enumerate(labels)]
    with pytest.raises(DataError, match=r"rows.jsonl:2: label is a list of 2") as caught:
        plan(rows)
    (fix,) = caught.value.fixes
    store = plan(rows, data={name.removeprefix("data."): value for name, value in fix.settings.items()}).store
    assert (store.num_samples, store.meta.labels) == (2, ("a", "b"))
    # where no row has one label, leaving them out is no way
    with pytest.raises(DataError, match="keep one of them for each text") as caught:
        plan([row for row in rows if len(row["label"]) == 2], file="several")
    assert not caught.value.fixes


def test_a_label_without_the_objective_means_what_it_did(plan):
    assert plan(ROWS, objective="cross_entropy").store.extra.keys() == set()
    judged = [{"prompt": "it was", "completion": f"great {k}", "label": k % 2 == 0} for k in range(4)]
    with pytest.raises(DataError, match="2 answers whose label is 0, and objective cross_entropy would learn them"):
        plan(judged, objective="cross_entropy", file="judged")
    with pytest.raises(DataError, match="has texts with labels, of which objective cross_entropy would learn"):
        plan(ROWS, {"format": "classify"}, objective="cross_entropy", file="classes")


def test_a_label_whose_rows_are_left_out_is_told_and_two_must_stay(config_of):
    empty, used = {"text": "", "label": "fair"}, tuple(sorted(WORDS))
    skips = {"data": {"on_bad_row": "skip"}}
    for file, rows, told in (
        ("whole", ROWS, []),
        ("some", [*ROWS, empty], ["3 of 4 are trained; no sample has 'fair', whose rows were left out"]),
    ):
        said = MemoryCallback()
        planned = open_and_plan(config_of(rows, file=file, **skips), Reporter(said), Rank())
        # the model has a score for each of the labels that are trained, and no other
        assert planned.scoring is not None
        assert planned.store.meta.labels == planned.scoring.labels == used
        assert [used[number] for number in planned.store.extra["class"]] == [row["label"] for row in ROWS]
        found = [text for _, name, text in said.stages if name == "labels"]
        assert found == told, file
    good = [row for row in ROWS if row["label"] == "good"]
    with pytest.raises(
        DataError, match="every row has the label 'good': there is nothing to classify; no sample has 'fair'"
    ):
        open_and_plan(config_of([*good, empty], file="one", **skips), Reporter(), Rank())


def test_evaluation_numbers_labels_as_training_does(plan):
    few = [{**row, "text": row["text"] + " then"} for row in ROWS if row["label"] != "bad"]
    assert plan(few, file="few").store.meta.labels == ("good", "so-so")
    [evaluated] = plan(ROWS, eval={"data": "few"}).eval_sets
    assert [sorted(WORDS)[number] for number in evaluated.store.extra["class"]] == [row["label"] for row in few]
    plan([*few, {"text": "it was", "label": "other"}], file="more")
    with pytest.raises(DataError, match=r"more.jsonl:8: label 'other' is none of those that are trained \(bad, good"):
        plan(ROWS, eval={"data": "more"})


@pytest.mark.parametrize(
    ("policy", "lengths", "count"),
    [("auto", [6, 6, 3, 3], {"truncated": 2}), ("drop", [3, 3], {"too_long": 2}), ("split", [], {})],
)
def test_a_text_over_the_limit_loses_its_end(plan, policy, lengths, count):
    texts = ["great " * 9, "poor " * 9, "so", "it"]
    rows = [{"text": text, "label": label} for text, label in zip(texts, "abab", strict=True)]
    limits = {"max_tokens": 6, "too_long": policy}
    if not lengths:
        with pytest.raises(DataError, match="split would give a label to parts of a text"):
            plan(rows, data=limits)
        return
    store = plan(rows, data=limits).store
    assert store.lengths.tolist() == lengths or len(store.lengths) == len(lengths)
    assert {name: store.meta.counts[name] for name in count} == count
    assert all(
        np.flatnonzero(store.sample(k).loss_mask).tolist() == [store.lengths[k] - 1] for k in range(len(lengths))
    )


def test_the_row_of_a_position_is_found_behind_shared_prefixes():
    ids = [np.array([5, 6, 7, 8]), np.array([5, 6, 0]), np.array([9, 0, 0]), np.array([0, 0])]
    samples = [(own, np.zeros(len(own), bool)) for own in ids]
    positions = [last_position(own, 0) for own in ids]
    assert positions == [3, 1, 0, 0]
    for shared in ((), ((2, 2),)):
        batch = flatten_samples(samples, shared=shared)
        rows = rows_of_positions(batch, positions, shared)
        assert batch.token_ids[rows].tolist() == [8, 6, 9, 0]
    rows = rows_of_positions(batch := flatten_samples(samples, row_length=8), positions, ())
    assert batch.token_ids[rows].tolist() == [8, 6, 9, 0]


def test_a_model_that_scores_does_not_write(config_of, tmp_path, capsys):
    short: dict[str, Any] = {"batch": {"max_steps": 1}, "optim": {"lr": 1e-30}}
    train(config_of(ROWS, **short))
    for verb in (["chat", "--prompt", "hi"], ["export", "--to", "gguf", "--out", str(tmp_path / "gguf")]):
        assert main([verb[0], str(tmp_path / "run"), *verb[1:]]) == 2
        assert "scores texts" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert list(merged.config.label2id) == sorted(WORDS)
    # a folder with a score goes on from it; other labels, and learning to write, are refused
    short["model"] = {"name": str(tmp_path / "merged"), "precision": "fp32"}
    train(config_of(ROWS, run="more", **short, method="full", seed=8))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "more/final")
    assert torch.equal(again.score.weight, merged.score.weight)
    two = config_of([row for row in ROWS if row["label"] != "so-so"], file="two", run="two", **short)
    with pytest.raises(UsageError, match="its scores are bad, good, so-so, but the run's bad, good"):
        train(two)
    with pytest.raises(UsageError, match="scores texts and does not write"):
        train(config_of(ROWS, file="writes", run="writes", objective="cross_entropy", **short))


def test_an_adapter_goes_on_only_with_its_own_labels(config_of, tmp_path):
    """Its rows of `score` would otherwise be read under other names."""
    short: dict[str, Any] = {"batch": {"max_steps": 1}, "optim": {"lr": 1e-30}}
    two = [row for row in ROWS if row["label"] != "so-so"]
    train(config_of(two, file="two", **short))
    short["lora"] = {"continue_from": str(tmp_path / "run/final")}
    train(config_of(two, file="two", run="same", **short))
    first, again = (load_file(tmp_path / run / "final/adapter_model.safetensors") for run in ("run", "same"))
    assert all(torch.allclose(own, again[name], rtol=0, atol=1e-20) for name, own in first.items())
    others = [{**row, "label": "meh" if row["label"] == "bad" else row["label"]} for row in two]
    for file, rows, labels in (("others", others, "good, meh"), ("three", ROWS, "bad, good, so-so")):
        with pytest.raises(UsageError, match=f"final: its scores are bad, good, but the run's {labels}; remove lora"):
            open_and_plan(config_of(rows, file=file, run=file, **short), Reporter(), Rank())


OWN = """
import flatout, torch.nn.functional as F
class Own(flatout.Objective):
    reads, columns, scope, normalizer = "scores", ("class",), "sample", "samples"
    def __call__(self, samples):
        return {"loss": F.cross_entropy(samples.scores, samples.column("class").long(), reduction="sum")}
"""


def test_scores_of_an_own_objective_are_of_whole_texts(config_of, metrics_of, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    lora = {"modules_to_save": ["score"]}
    sections: dict[str, Any] = {"objective": f"{tmp_path / 'own.py'}:Own", "lora": lora, "batch": {"max_steps": 1}}
    train(config_of(ROWS, {"format": "classify"}, **sections))
    train(config_of(ROWS, run="classify", batch=sections["batch"]))
    own, known = (metrics_of(tmp_path / run)[0]["loss"] for run in ("run", "classify"))
    assert own == pytest.approx(known, rel=1e-6)
    over_ranks = config_of(ROWS, {"format": "classify"}, context={"parallel": 2}, **sections)
    with pytest.raises(UsageError, match=r"context.parallel: 2: objective Own scores the last"):
        open_and_plan(over_ranks, Reporter(), Rank(0, 2))
