"""Whole runs that share a system prompt: said at the start, the same losses as unshared, the same bits resumed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import as_after, require_equal, state_of

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import UsageError
from flatout.trainer.run import train
from tests.usual import usual

SYSTEM = " ".join(f"Rule {number}: answer in one full sentence, and name what you do not know." for number in range(8))


@pytest.fixture(scope="module")
def chats(tiny, tmp_path_factory):
    """The tiny world's chats, all but a few with one system prompt."""
    path = tmp_path_factory.mktemp("shared") / "chats.jsonl"
    rows = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()]
    told = [
        [{"role": "system", "content": SYSTEM}, *(turn for turn in messages if turn["role"] != "system")]
        if place % 5
        else messages
        for place, messages in enumerate(rows)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in told))
    return path


def run_of(tiny: Any, chats: Path, folder: Path, **sections: Any) -> Any:
    model = {"name": str(tiny.model_dir), "precision": "fp64", **sections.pop("model", {})}
    data = {"name": "told", "root": str(chats.parent), "sources": [{"path": str(chats)}], "max_tokens": 1500}
    batch = {"samples_per_step": 7, "micro_batch_tokens": 1500, "max_steps": 4, **sections.pop("batch", {})}
    return tiny.config(folder, model=model, data=data, batch=batch, **sections)


def said(folder: Path, name: str) -> list[str]:
    return re.findall(rf"(?m)^\S+ {name} +(.*)", (folder / "train.log").read_text())


def test_as_typed(tiny, chats, tmp_path, capsys, metrics_of):
    """The plan tells the gain, the run says it shares, and its records and its report have the share."""
    config = run_of(tiny, chats, tmp_path / "run", eval={"fraction": 0.1})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert (found := re.search(r"prefixes shared: ([\d,]+) tokens, ([\d.]+)%, are not computed again", planned))
    assert float(found[2]) > 20
    assert main(["plan", str(tmp_path / "run.yaml"), "--step", "0"]) == 0
    assert "tokens in shared prefixes not computed again" in " ".join(capsys.readouterr().out.split())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert said(tmp_path / "run", "prefixes") == [f"shared: {found[2]}% of the tokens are not computed again"]
    assert "shared prefixes = unshared within" in said(tmp_path / "run", "self-test")[0]
    records = metrics_of(tmp_path / "run")
    assert sum(each["num_tokens"] * each["shared_share"] for each in records) == pytest.approx(
        int(found[1].replace(",", "")), rel=1e-9
    )
    for each in records:
        assert each["processed_tokens_per_s"] == pytest.approx(
            each["tokens_per_s"] * (1 - each["shared_share"]), rel=1e-9
        )
    plan = json.loads((tmp_path / "run" / "start.json").read_text())["plan"]
    assert plan["shared_share"] == pytest.approx(float(found[2]) / 100, abs=1e-3)
    drawn = sum(sum(map(sum, rank)) for step in plan["packing"] for rank in step)
    assert drawn == sum(each["num_tokens"] for each in records) - int(found[1].replace(",", ""))
    assert main(["report", str(tmp_path / "run"), "--format", "md"]) == 0


RUNS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "full": {"method": "full", "recompute": "full"},
    "offload": {"method": "lora", "recompute": "offload", "batch": {"micro_batch_tokens": 1200}},
}


@pytest.mark.parametrize("name", usual(RUNS, ["full", "offload"]))
def test_sharing_changes_no_step_and_resumes_to_the_bit(tiny, chats, tmp_path, metrics_of, name):
    settings = {**RUNS[name], "checkpoint": {"every_steps": 1, "keep": 9}, "eval": {"fraction": 0.1}}
    batch = settings.pop("batch", {})
    shared = run_of(tiny, chats, tmp_path / "shared", batch={"share_prefix": "on", **batch}, **settings)
    train(shared)
    train(run_of(tiny, chats, tmp_path / "apart", batch={"share_prefix": "off", **batch}, **settings))
    assert said(tmp_path / "apart", "prefixes") == ["not shared: as configured"]
    for kind, names in (("step", ("loss", "grad_norm", "num_tokens", "num_label_tokens")), ("eval", ("eval_loss",))):
        ours, apart = (metrics_of(tmp_path / run, kind) for run in ("shared", "apart"))
        assert len(ours) == len(apart) > 0
        for figure in names:
            # norms compute in float32
            assert [each[figure] for each in ours] == pytest.approx([each[figure] for each in apart], rel=1e-6)
    train(shared.model_copy(update={"run_dir": as_after(tmp_path / "shared", 2, tmp_path / "again")}))
    require_equal(state_of(tmp_path / "again", 4), state_of(tmp_path / "shared", 4))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"lora": {"dropout": 0.1}}, "with lora.dropout, samples must have masks of their own"),
        ({"model": {"neftune_alpha": 5.0}}, "with model.neftune_alpha, samples must have noise of their own"),
        ({"batch": {"layout": "rows"}}, "each sample is a row of its own"),
    ],
)
def test_what_cannot_share_says_why(tiny, chats, tmp_path, sections, why):
    batch = {"max_steps": 1, **sections.pop("batch", {})}
    train(run_of(tiny, chats, tmp_path / "auto", batch=batch, **sections))
    assert said(tmp_path / "auto", "prefixes") == [f"not shared: {why}"]
    with pytest.raises(UsageError, match=f"batch.share_prefix: on .*{why}") as refused:
        train(run_of(tiny, chats, tmp_path / "on", batch={**batch, "share_prefix": "on"}, **sections))
    assert refused.value.fixes[0].settings == {"batch.share_prefix": "auto"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window is 100"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope dynamic depends on"),
        ({"attention_dropout": 0.1}, "with attention_dropout, samples must have masks"),
    ],
)
def test_what_a_model_would_compute_differently_is_not_shared(tiny, chats, tmp_path, change, why, capsys):
    shutil.copytree(tiny.model_dir, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    values.pop("layer_types", None)
    path.write_text(json.dumps(values | change))
    config = run_of(tiny, chats, tmp_path / "run", model={"name": str(tmp_path / "model")})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert f"prefixes not shared: {why}" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(tmp_path / "run.yaml"), "batch.share_prefix=on"]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_ranks_that_share_micro_batches_share_no_prefixes(tiny, chats, tmp_path, capsys):
    config = run_of(tiny, chats, tmp_path / "run", batch={"share_prefix": "on"})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    typed = [str(tmp_path / "run.yaml"), "device=cpu", "gpus=[0,1]", "context.parallel=2"]
    assert main(["train", *typed]) == 2
    assert "context.parallel: 2 does not work with batch.share_prefix: on" in capsys.readouterr().err
    assert main(["plan", *typed, "--ranks", "2", "batch.share_prefix=auto"]) == 0
    why = "prefixes not shared: with context.parallel, ranks share each sample's tokens"
    assert why in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("num_ranks", usual([1, 2], [1]))
def test_every_cut_and_strategy_agrees_with_samples_alone(tiny, chats, tmp_path, num_ranks):
    config = run_of(tiny, chats, tmp_path / "run", model={"precision": "fp32"}, batch={"share_prefix": "on"})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["verify", str(tmp_path / "run.yaml"), "--ranks", str(num_ranks)]) == 0
    rows = {row["case"]: row for row in json.loads((config.folder / "verify.json").read_text())["rows"]}
    over_ranks = ("ddp", "zero1", "zero2", "zero3", "fsdp") if num_ranks == 2 else ()
    assert {"packed", "each sample alone", *over_ranks} <= rows.keys()
    assert max(row["worst_difference"] for row in rows.values()) < 1e-4


def test_data_without_a_common_start_shares_nothing(tiny, tmp_path):
    train(tiny.config(tmp_path / "run", batch={"max_steps": 1, "share_prefix": "on"}))
    assert said(tmp_path / "run", "prefixes") == ["not shared: no samples begin with the same 64 unlabelled tokens"]


def test_a_small_gain_is_left_unless_asked_for(tiny, tmp_path, capsys):
    """Two of many chats begin alike."""
    rows = [json.loads(line) for line in tiny.chats.read_text().splitlines()]
    for row in rows[:2]:
        row["messages"] = [{"role": "system", "content": SYSTEM}, *row["messages"]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_of(tiny, path, tmp_path / "run", batch={"samples_per_step": 120, "max_steps": 1})
    (tmp_path / "run.yaml").write_text(dump_config(config.model_copy(update={"run_dir": tmp_path / "run"})))
    budget = "batch.micro_batch_tokens=40000"
    assert main(["plan", str(tmp_path / "run.yaml"), budget]) == 0
    assert re.search(
        r"prefixes not shared: this would save [\d.]+% of the tokens, less than 5%",
        " ".join(capsys.readouterr().out.split()),
    )
    assert main(["plan", str(tmp_path / "run.yaml"), budget, "batch.share_prefix=on"]) == 0
    assert re.search(r"prefixes shared: [\d,]+ tokens", " ".join(capsys.readouterr().out.split()))


def test_a_model_that_fails_the_self_test_is_planned_again_without(tiny, chats, tmp_path, monkeypatch):
    """An attention that leaves out the keys of the prefixes, as a kernel could that does not know them."""
    from flatout.kernels.attention import reference
    from flatout.models import attention

    def wrong(*tensors: Any, shared: Any = None, **settings: Any) -> Any:
        return reference.sdpa_attention(*tensors, **settings)

    monkeypatch.setattr(attention, "sdpa_attention", wrong)
    train(run_of(tiny, chats, tmp_path / "run", batch={"max_steps": 1}))
    first, second = said(tmp_path / "run", "prefixes")
    assert first.startswith("shared: ")
    assert second.startswith("not shared: model type qwen3: shared prefixes change hidden states by")
    with pytest.raises(UsageError, match="shared prefixes change hidden states"):
        train(run_of(tiny, chats, tmp_path / "other", batch={"max_steps": 1, "share_prefix": "on"}))
