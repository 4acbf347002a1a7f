"""Micro-batches shared by 2 and 4 gloo ranks equal one process: loss, norm, every gradient, weights, evaluation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from flatout.config.read import make_config
from flatout.errors import FlatoutError
from flatout.parallel.rank import Rank
from flatout.planner.devices import DEVICES
from flatout.planner.memory.budget import longest_document_tokens
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train

sys.path.insert(0, str(Path(__file__).parent))

from launching import DEADLINE_S
from strategies import run_cases
from test_checkpoint_runs import WEIGHTS, keep_only
from test_gloo import finish, start
from test_strategies import EXACT, Cases, assert_close, values

LIMITS = dict.fromkeys(EXACT, 1e-12)
# chats in one document: about 250 tokens each
LONG = (8, 5, 1, 3, 1, 7, 1, 1, 2, 1, 6, 1, 1, 1, 4)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}),
    # windows of 100 tokens in the first layer
    "windows": (
        "qwen3",
        {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    # sinks, biases, windows of 100 tokens
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100}),
    # soft-capped scores
    "gemma2": ("gemma2", {"sliding_window": 100}),
}


@pytest.fixture(scope="session")
def long_chats(tiny, tmp_path_factory):
    """Chats of several conversations, up to 2,000 tokens, among short ones."""
    conversations = [json.loads(line)["messages"] for line in tiny.chats.read_text().splitlines()]
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    with path.open("w") as file:
        for count in LONG:
            messages = [one for _ in range(count) for one in conversations.pop() if one["role"] != "system"]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):
    """Folders of tiny models by name."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(tiny.model_dir)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 4096}
    found = {}
    for name, (kind, own) in KINDS.items():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**sizes, **ids, num_key_value_heads=2, head_dim=8, **own)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        found[name] = str(folder / name)
    return found


def shared(tiny: Any, long_chats: Path, method: str, num_ranks: int = 2, **sections: Any) -> tuple[Any, Any]:
    """Settings of a run whose micro-batches are shared by so many ranks, and of one process."""
    sections.setdefault("batch", {"samples_per_step": 4, "micro_batch_tokens": 3000})
    own = {"name": "long", "sources": [{"path": str(long_chats)}], "max_tokens": 3000, "tokenizer": str(tiny.model_dir)}
    precision = sections.pop("precision", "fp64")
    given = values(tiny, method, precision, data=own, eval={"fraction": 0.2}, **sections)
    return {**given, "context": {"parallel": num_ranks}}, {**given, "strategy": "auto"}


def add(cases: Cases, name: str, num_steps: int, pair: tuple[Any, Any], kind: str = "steps") -> None:
    cases.add(name, num_steps, pair[0], like=pair[1], kind=kind)


def add_models(cases: Cases, long_chats: Path, models: dict[str, str], names: tuple[str, ...]) -> None:
    for name in names:
        losses = {"experts": {"balance_loss": 0.5, "z_loss": 0.01}} if name == "qwen3_moe" else {}
        model = {"name": models[name], "precision": "fp64"}
        # gemma's norms compute in fp32, in which a last bit may differ
        precision = "fp32" if name == "gemma2" else "fp64"
        add(
            cases,
            f"{precision} {name}",
            2,
            shared(cases.tiny, long_chats, "full", strategy="ddp", model=model, **losses),
        )


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_equal_one(tiny, long_chats, models, tmp_path, num_ranks):
    cases = Cases(tiny, tmp_path)
    # with 4 ranks, two groups of two under ddp
    add(cases, "fp64 lora ddp", 3, shared(tiny, long_chats, "lora", strategy="ddp"))
    add(cases, "fp64 full zero3", 2, shared(tiny, long_chats, "full", num_ranks, strategy="zero3"))
    plain = {"name": str(tiny.model_dir), "attention": "plain", "precision": "fp64"}
    given = shared(tiny, long_chats, "full", num_ranks, strategy="ddp", recompute="full", model=plain)
    add(cases, "fp64 full ddp plain recompute", 2, given)
    short = shared(tiny, tiny.chats, "lora", num_ranks, strategy="ddp", batch={"micro_batch_tokens": 900})
    add(cases, "fp64 lora short", 2, short)
    for strategy in ("zero1", "zero2", "hsdp") if num_ranks == 4 else ():
        sharding = {"replicas": 2} if strategy == "hsdp" else {}
        given = shared(tiny, long_chats, "full", strategy=strategy, sharding=sharding)
        add(cases, f"fp64 full {strategy}", 2, (given[0], {**given[1], "sharding": {}}))
    for kind in ("stopped", "poisoned"):
        add(cases, f"fp64 full {kind}", 1, shared(tiny, long_chats, "full", strategy="ddp"), kind)
    add_models(cases, long_chats, models, ("gpt_oss", "qwen3_moe") if num_ranks == 2 else tuple(KINDS))
    report = run_cases(cases.cases, cases.folder, num_ranks, DEADLINE_S)
    assert_close(report, "fp64", LIMITS)
    if num_ranks == 4:
        assert_close(report, "fp32", {"loss": 1e-9, "norm": 1e-9, "grads": 1e-6, "weights": 1e-4})


@pytest.mark.exhaustive
def test_a_run_resumes_under_another_number_of_ranks(tiny, long_chats, tmp_path, metrics_of):
    given, alone = shared(tiny, long_chats, "lora", strategy="ddp")

    def config(name: str, values: Any) -> Any:
        own = {"run_dir": str(tmp_path / name), "checkpoint": {"every_steps": 2, "keep": 5}}
        return make_config({**values, **own, "batch": {**values["batch"], "max_steps": 4}})

    train(config("one", alone))
    assert finish(start(config("shared", given), tmp_path, 2)) == [0, 0]
    said = (tmp_path / "shared/train.log").read_text()
    assert "ddp over 2 ranks: as configured; 2 ranks share each micro-batch's tokens" in said
    assert "2 ranks share each micro-batch; equal to whole within" in said
    for name in ("again", "back"):
        keep_only(tmp_path / "shared", tmp_path / name, 2)
    assert finish(start(config("again", given), tmp_path, 2)) == [0, 0]
    train(config("back", alone))
    weights = {
        name: load_file(tmp_path / name / "final" / WEIGHTS["lora"]) for name in ("one", "shared", "again", "back")
    }
    for name, tensor in weights["one"].items():
        assert torch.equal(weights["again"][name], weights["shared"][name])
        for other in ("shared", "back"):
            torch.testing.assert_close(weights[other][name], tensor, rtol=1e-9, atol=1e-11)
    # each token counts once
    for one, two in zip(*map(metrics_of, (tmp_path / "one", tmp_path / "shared")), strict=True):
        for key in ("num_tokens", "num_label_tokens", "num_micro_batches", "num_samples", "lr"):
            assert two[key] == one[key]
        for key in ("loss", "grad_norm", "token_accuracy"):
            assert two[key] == pytest.approx(one[key], rel=1e-10)
        assert two["num_ranks"] == 2


@pytest.mark.parametrize(
    ("num_ranks", "sections", "said"),
    [
        (3, {}, "context.parallel: 2: it must divide the number of ranks, which is 3 (gpus, or --ranks"),
        (2, {"experts": {"parallel": 2}}, "context.parallel: 2 does not work with experts.parallel: 2"),
        (2, {"strategy": "deepspeed", "precision": "fp32"}, "does not work with strategy: deepspeed"),
        (2, {"gpus": [0, 1, 2]}, "does not work with 3 gpus, which it does not divide"),
        (2, {"batch": {"layout": "rows"}}, "does not work with batch.layout: rows"),
        (2, {"model": {"neftune_alpha": 5.0}}, "does not work with model.neftune_alpha"),
        (2, {"model": {"attention": "fa4"}}, "does not work with model.attention: fa4"),
        (2, {"method": "full", "full": {"update": "backward"}}, "does not work with full.update: backward"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(tiny, long_chats, num_ranks, sections, said):
    method = sections.pop("method", "lora")
    if method == "full":
        sections["optim"] = {"max_grad_norm": None}
    given, _ = shared(tiny, long_chats, method, **sections)
    with pytest.raises(FlatoutError, match=re.escape(said)):
        open_and_plan(make_config(given), Reporter(), Rank(0, num_ranks))


def test_models_whose_tokens_need_more_than_keys_are_refused(tiny, long_chats, length_scaled, tmp_path):
    given, _ = shared(tiny, long_chats, "lora")
    with pytest.raises(FlatoutError, match=r"rope \w+ depends on a document's length") as refused:
        open_and_plan(make_config({**given, "model": str(length_scaled)}), Reporter(), Rank(0, 2))
    assert refused.value.fixes[0].settings == {"context.parallel": 1}
    shape = json.loads((tiny.model_dir / "config.json").read_text())
    sizes = {name: shape[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    CONFIG_MAPPING["lfm2"](**sizes, intermediate_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    model = {"name": str(tmp_path), "init": "random"}
    with pytest.raises(FlatoutError, match="its layers carry a recurrent or convolution state"):
        open_and_plan(make_config({**given, "model": model, "lora": {"rank": 4}}), Reporter(), Rank(0, 2))


def test_an_objective_that_needs_whole_documents_is_refused(tiny, long_chats, tmp_path):
    given, _ = shared(tiny, long_chats, "lora")
    for scope in ("sample", "token"):
        (tmp_path / "own.py").write_text(f"import flatout\nclass Own(flatout.Objective):\n    scope = {scope!r}\n")
        config = make_config({**given, "objective": f"{tmp_path / 'own.py'}:Own"})
        if scope == "token":
            assert open_and_plan(config, Reporter(), Rank(0, 2)).parallel_layout.context_ranks == 2
            continue
        with pytest.raises(
            FlatoutError, match="objective Own reads all tokens of a sample, of which a rank has a shard"
        ):
            open_and_plan(config, Reporter(), Rank(0, 2))


def test_a_plan_for_shared_micro_batches_has_room_for_longer_documents(tiny, long_chats):
    found, longest, device = {}, {}, DEVICES["h200"]
    tokens = MicroBatchSize(65536, num_label_tokens=30000, num_documents=2)
    for context_ranks in (1, 4):
        given, _ = shared(tiny, long_chats, "lora", context_ranks, strategy="ddp", precision="bf16", memory=2.0)
        given["batch"].pop("micro_batch_tokens")
        config, recorder = make_config(given), MemoryCallback()
        planned = open_and_plan(config, Reporter(recorder), Rank(0, 8), device)
        assert planned.plan.batch_layout.num_ranks == 8 // context_ranks
        memory = planned.memory.estimate(tokens)
        assert memory is not None
        found[context_ranks] = memory
        longest[context_ranks] = longest_document_tokens(
            planned.data.settings, planned.shape, device, 0.5, planned.parallel_layout
        )
    assert found[1].state_bytes == found[4].state_bytes
    assert found[4].activations_bytes == pytest.approx(found[1].activations_bytes / 4, rel=0.01)
    assert 2 * longest[1] < longest[4] <= 4 * longest[1]
