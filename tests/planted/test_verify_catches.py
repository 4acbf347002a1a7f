"""`flatout verify` must see bugs of this field in its own figures, each planted in a copy of the package.

It must see them on a model that knows its data by heart too, and pass that model without them: its gradient is what is
left of p - 1, and its loss of log p, where p is close to 1.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bugs import BUGS, ROOT, Bug, plant

from flatout.cli.main import main
from flatout.config.read import dump_config

KNOWN = {bug.name: bug for bug in BUGS}
# the self-test at start-up sees leaks as well; without it verify has to see them by itself
NO_SELF_TEST = Bug("no self-test", "check_packing", "model = X.model", "return 'not looked at'", "")
SHARDS_AVERAGED = Bug(
    "shards averaged", "Sharded.prepare", "X.set_gradient_divide_factor(1.0)", "X.set_gradient_divide_factor(2.0)", ""
)


def verify_with(
    bugs: list[Bug], tiny: Any, folder: Path, *, num_ranks: int = 2, **settings: Any
) -> tuple[int, dict[str, dict[str, Any]]]:
    shutil.copytree(ROOT / "flatout", folder / "flatout")
    for bug in bugs:
        plant(bug, folder)
    config = tiny.config(folder / "run", **settings)
    (folder / "run.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "flatout", "verify", str(folder / "run.yaml"), "--ranks", str(num_ranks)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "run" / "verify.json").exists(), done.stderr
    report = json.loads((folder / "run" / "verify.json").read_text())
    return done.returncode, {row["case"]: row for row in report["rows"]}


def verify_here(tiny: Any, folder: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    (folder / "run.yaml").write_text(dump_config(tiny.config(folder / "run", **settings)))
    assert main(["verify", str(folder / "run.yaml"), "--ranks", "1"]) == 0
    report = json.loads((folder / "run" / "verify.json").read_text())
    return {row["case"]: row for row in report["rows"]}


@pytest.fixture(scope="module")
def by_heart(tiny, tmp_path_factory):
    """Settings of a model that has learned six short chats until its loss is about 1e-4."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("by-heart")
    model, tokenizer = (auto.from_pretrained(tiny.model_dir) for auto in (AutoModelForCausalLM, AutoTokenizer))
    lines = sorted(tiny.chats.read_text().splitlines(keepends=True), key=len)[:6]
    (folder / "chats.jsonl").write_text("".join(lines))
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.8)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sources = [{"path": str(folder / "chats.jsonl")}]
    return {"model": {"name": str(folder / "model")}, "data": {"name": "by-heart", "sources": sources}}


@pytest.fixture(params=[pytest.param("ordinary", marks=pytest.mark.exhaustive), "by heart"])
def learned(request):
    """Settings of a model that knows nothing yet, and of one that knows its data by heart."""
    settings: dict[str, Any] = request.getfixturevalue("by_heart") if request.param == "by heart" else {}
    return settings


def failed(rows: dict[str, dict[str, Any]]) -> set[str]:
    return {case for case, row in rows.items() if row["verdict"] == "FAIL"}


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_a_model_that_knows_its_data_by_heart_agrees(tiny, tmp_path, by_heart, method):
    rows = verify_here(tiny, tmp_path, method=method, **by_heart)
    assert 1e-6 < rows["packed"]["loss"] < 1e-3
    assert rows["packed"]["verdict"] == rows["each sample alone"]["verdict"] == "ok"
    assert max(row["worst_difference"] for row in rows.values() if row["verdict"] == "ok") < 5e-5
    assert max(row["loss_difference"] for row in rows.values() if row["verdict"] == "ok") < 5e-6
    assert all(row["limit"] <= 1e-3 for row in rows.values())


@pytest.mark.exhaustive
def test_mean_of_means_is_seen_where_there_are_several_micro_batches(tiny, tmp_path, learned):
    code, rows = verify_with([KNOWN["mean of means"]], tiny, tmp_path, **learned)
    assert code == 5
    assert failed(rows) >= {"packed, 2 micro-batches", "each sample alone", "ddp", "fsdp"}
    assert rows["packed"]["verdict"] == "ok"


@pytest.mark.exhaustive
def test_a_missing_factor_of_the_world_size_is_seen_over_ranks_only(tiny, tmp_path, learned):
    code, rows = verify_with([KNOWN["ranks averaged"], SHARDS_AVERAGED], tiny, tmp_path, **learned)
    assert code == 5
    assert failed(rows) == {"ddp", "zero1", "zero2", "zero3", "fsdp", "ddp, context.parallel 2"}
    for case in failed(rows):
        assert rows[case]["worst_difference"] == pytest.approx(0.5, rel=1e-3)
        # the loss is right and so is the direction: only the size tells
        assert rows[case]["loss_difference"] < 1e-6
        assert rows[case]["cosine"] > 0.999999


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_an_all_ones_mask_while_packing_is_seen_wherever_samples_meet(tiny, tmp_path, num_ranks, learned):
    bugs = [KNOWN["documents see each other"], NO_SELF_TEST]
    code, rows = verify_with(bugs, tiny, tmp_path, num_ranks=num_ranks, **learned)
    assert code == 5
    assert failed(rows) >= {
        "packed",
        "packed, 2 micro-batches",
        *(["ddp, context.parallel 2"] if num_ranks == 2 else []),
    }
    assert rows["each sample alone"]["verdict"] == "ok"


@pytest.mark.exhaustive
def test_after_a_failed_self_test_padded_rows_are_compared_and_the_reason_is_named(tiny, tmp_path):
    code, rows = verify_with([KNOWN["documents see each other"]], tiny, tmp_path)
    assert code == 0
    assert not failed(rows)
    assert "rows, 3 micro-batches" in rows
    assert "packed" not in rows
    assert "packed logits differ" in rows["ddp, context.parallel 2"]["note"]


@pytest.mark.parametrize(
    "bugs", [[], pytest.param(["two roundings of fused layers"], marks=pytest.mark.exhaustive)], ids=["none", "planted"]
)
def test_a_change_that_is_rounded_away_is_seen(bugs, tiny, tmp_path):
    settings = {"model": {"precision": "bf16"}, "optim": {"lr": 1e-5}}
    code, rows = verify_with([KNOWN[name] for name in bugs], tiny, tmp_path, num_ranks=1, **settings)
    row = rows["first update's change that arrives"]
    assert code == (5 if bugs else 0)
    assert row["verdict"] == ("FAIL" if bugs else "ok")
    assert (row["share"] < 0.6) if bugs else abs(row["share"] - 1) < 0.05
