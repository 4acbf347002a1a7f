"""Every strategy over 2 and 4 gloo ranks equals one process: loss, norm, every gradient, weights after 20 steps."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import DEADLINE_S
from strategies import reference, run_cases, spawn

SHARDED = ("zero1", "zero2", "zero3")
# with micro-batches of other sizes than one process has
OPTIMIZERS = [("full", "muon", "ddp"), ("lora", "muon", "ddp"), ("full", "adafactor", "ddp"), ("lora", "lion", "ddp")]
OPTIMIZERS += [("full", "lion", "zero1"), ("full", "lion", "zero3")]
USUAL_OPTIMIZERS = [("full", "muon", "ddp"), ("full", "adafactor", "ddp"), ("full", "lion", "zero3")]


def values(tiny: Any, method: str, precision: str = "fp64", **sections: Any) -> dict[str, Any]:
    """20 steps of 8 samples, every fourth of 1; clipping is active; the model's embeddings are tied."""
    given: dict[str, Any] = {
        "device": "cpu",
        "seed": 7,
        "method": method,
        "model": {"name": str(tiny.model_dir), "precision": precision},
        "data": {
            "name": "few",
            "root": str(tiny.root / "data"),
            "sources": [{"path": str(tiny.chats)}],
            "max_tokens": 250,
            "num_samples": 28,
        },
        "batch": {"samples_per_step": 8, "micro_batch_tokens": 500, "max_steps": 20},
        "optim": {"lr": 1e-3, "max_grad_norm": 0.1, "weight_decay": 0.1},
        "checkpoint": {"every_steps": None},
        "eval": {"fraction": 0.1, "max_new_tokens": 4, "temperature": 1.0},
    }
    if method == "lora":
        given["lora"] = {"rank": 4, "alpha": 8}
    if precision != "fp64" and sections.get("strategy") != "zero3":
        # rounding may change the likeliest token, so answers are not compared: with shards they are still made
        given["eval"] = {"fraction": 0.1, "prompts": []}
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section} if isinstance(section, dict) else section
    return given


class Cases:
    """Cases with their references, each reference computed once; `rare` cases only where `every` case is run."""

    def __init__(self, tiny: Any, folder: Path, *, every: bool = True) -> None:
        self.tiny, self.folder, self.every = tiny, folder, every
        self.cases: list[dict[str, Any]] = []
        self.references: dict[str, str] = {}

    def add(
        self,
        name: str,
        num_steps: int,
        given: dict[str, Any],
        *,
        like: dict[str, Any] | None = None,
        kind: str = "steps",
        rare: bool = False,
    ) -> None:
        """A case beside one process of the same settings, or of those of `like`."""
        if rare and not self.every:
            return
        alone = ("strategy", "sharding", "comm", "deepspeed")
        truth = {key: value for key, value in (like or given).items() if key not in alone}
        case = {"name": name, "kind": kind, "num_steps": num_steps, "values": given}
        key = json.dumps([kind, num_steps, truth], sort_keys=True)
        if key not in self.references:
            self.references[key] = reference(truth, case, self.folder, str(len(self.references)))
        self.cases.append({**case, "reference": self.references[key]})


def add_quantized(cases: Cases, random: dict[str, str]) -> None:
    for storage in ("nf4", "fp8"):
        for strategy in ("ddp", "zero2", "zero3"):
            given = values(cases.tiny, "lora", "fp32", strategy=strategy, base={"storage": storage})
            cases.add(f"{storage} fp32 {strategy}", 2, given, rare=storage == "fp8")
        again = {**given, "recompute": "full", "model": {**random, "precision": "fp32"}}
        cases.add(f"{storage} fp32 zero3 random", 2, again, rare=storage == "fp8")
    given = values(cases.tiny, "lora", "fp32", strategy="ddp", base={"backward": "fp8"})
    cases.add("fp8 backward fp32 ddp", 2, given)


def add_low_bit(cases: Cases, strategy: str, weights: str) -> None:
    """8-bit moments, and weights in bf16 alone: another order of a sum may move a code, and a gradient's last bit."""
    sections: dict[str, Any] = {"full": {"weights": weights}, "optim": {"name": "adamw8bit"}}
    if strategy == "hsdp":
        sections["sharding"] = {"replicas": 2}
    given = values(cases.tiny, "full", weights, strategy=strategy, **sections)
    cases.add(f"8-bit moments, {weights} weights {strategy}", 4, given)


def add_plain(cases: Cases) -> None:
    """Each method under each strategy, in half of the pairs after the proof of compiled layers."""
    proved = {("lora", "ddp"), ("lora", "zero2"), ("full", "zero1"), ("full", "zero3")}
    for method in ("lora", "full"):
        for strategy in ("ddp", *SHARDED):
            given, pair = values(cases.tiny, method, strategy=strategy), (method, strategy)
            num_steps = 20 if strategy == "zero3" else 4
            cases.add(f"fp64 {method} {strategy}", num_steps, given, rare=pair in proved and strategy != "zero3")
            cases.add(f"fp64 {method} {strategy} proved", 2, given, kind="proved", rare=pair not in proved)


def add_kinds(cases: Cases) -> None:
    """Steps in which ranks differ: each kind once with gradients summed at the end and once with shards."""
    usual = {("lora", "ddp", "masked"), ("full", "zero3", "masked"), ("lora", "zero3", "stopped")}
    usual |= {("full", "ddp", "stopped"), ("lora", "ddp", "poisoned"), ("full", "zero3", "poisoned")}
    for method in ("lora", "full"):
        for strategy in ("ddp", "zero3"):
            given = values(cases.tiny, method, strategy=strategy)
            for kind in ("masked", "stopped", "poisoned"):
                rare = (method, strategy, kind) not in usual
                cases.add(f"fp64 {method} {strategy} {kind}", 1, given, kind=kind, rare=rare)


@pytest.fixture(scope="module")
def untied(tiny, tmp_path_factory):
    """The tiny model with a head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(tiny.model_dir, folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "tie_word_embeddings": False}))
    return str(folder)


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["usual", "every"]
)
def two_ranks(request, tiny, untied, tmp_path_factory):
    cases = Cases(tiny, tmp_path_factory.mktemp("two"), every=request.param)
    add_plain(cases)
    add_kinds(cases)
    for strategy in ("ddp", "zero3"):
        cases.add(f"fp32 full {strategy}", 4, values(tiny, "full", "fp32", strategy=strategy))
    for strategy in ("ddp", *SHARDED):
        for tokens in (250, 5000):
            given = values(tiny, "full", strategy=strategy, batch={"micro_batch_tokens": tokens})
            rare = (strategy, tokens) in {("ddp", 5000), ("zero1", 5000), ("zero2", 250)}
            cases.add(f"fp64 full {strategy} {tokens} tokens", 2, given, like=values(tiny, "full"), rare=rare)
    offload = {"offload": True, "prefetch": 2, "reshard_after_forward": False}
    cases.add("fp64 full zero3 offload", 2, values(tiny, "full", strategy="zero3", sharding=offload))
    noise, again = {"neftune_alpha": 5.0}, {"reshard_after_forward": True}
    cases.add("fp64 lora zero2 freed, noise", 2, values(tiny, "lora", strategy="zero2", sharding=again, model=noise))
    smoothed = {"label_smoothing": 0.1, "z_loss": 0.01}
    given = values(tiny, "full", strategy="zero3", recompute="full", objective=smoothed)
    cases.add("fp64 full zero3 recompute, smoothed", 2, given)
    random = {"name": untied, "init": "random"}
    for strategy in ("ddp", "zero3"):
        rare = strategy == "ddp"
        cases.add(f"fp64 full {strategy} untied", 2, values(tiny, "full", strategy=strategy, model=random), rare=rare)
        dora = {"dora": True, "targets": ["q_proj", "down_proj"]}
        given = values(tiny, "lora", strategy=strategy, lora=dora, optim={"lr_ratio": 4.0})
        cases.add(f"fp64 lora {strategy} dora, lora+", 2, given, rare=rare)
        for method in ("lora", "full"):
            sent = values(tiny, method, strategy=strategy, comm={"compress": "bf16"})
            rare = (method, strategy) in {("lora", "ddp"), ("full", "zero3")}
            cases.add(f"bf16 sums {method} {strategy}", 1, sent, rare=rare)
    for method, name, strategy in OPTIMIZERS:
        own = {"optim": {"name": name}, "batch": {"micro_batch_tokens": 250}}
        given = values(tiny, method, strategy=strategy, **own)
        like, rare = values(tiny, method, optim={"name": name}), (method, name, strategy) not in USUAL_OPTIMIZERS
        cases.add(f"fp64 {method} {strategy} {name}", 4, given, like=like, rare=rare)
    add_quantized(cases, random)
    add_low_bit(cases, "zero1", "fp32")
    add_low_bit(cases, "zero3", "bf16")
    return run_cases(cases.cases, cases.folder, 2, DEADLINE_S)


@pytest.fixture(scope="module")
def four_ranks(tiny, tmp_path_factory):
    cases = Cases(tiny, tmp_path_factory.mktemp("four"))
    for method in ("lora", "full"):
        for strategy in ("ddp", "zero1", "zero3", "hsdp"):
            sharding = {"replicas": 2} if strategy == "hsdp" else {}
            given = values(tiny, method, strategy=strategy, sharding=sharding)
            cases.add(f"fp64 {method} {strategy}", 4, given)
        cases.add(f"fp64 {method} {strategy} masked", 1, given, kind="masked")
    quantized = {"base": {"storage": "nf4"}, "sharding": {"replicas": 2, "offload": True}}
    cases.add("nf4 fp32 hsdp offload", 2, values(tiny, "lora", "fp32", strategy="hsdp", **quantized))
    add_low_bit(cases, "hsdp", "bf16")
    return run_cases(cases.cases, cases.folder, 4, DEADLINE_S)


def assert_close(report: dict[str, dict[str, Any]], prefix: str, limits: dict[str, float]) -> None:
    chosen = {name: entry for name, entry in report.items() if name.startswith(prefix)}
    assert chosen
    wrong = {
        name: {key: entry[key] for key in limits if entry.get(key, 0.0) > limits[key]} for name, entry in chosen.items()
    }
    assert not {name: over for name, over in wrong.items() if over}


EXACT = {"loss": 1e-10, "norm": 1e-10, "grads": 1e-10, "weights": 1e-10, "eval": 1e-10, "answers": 0.0}


def check_fp64(two_ranks: dict[str, dict[str, Any]]) -> None:
    assert_close(two_ranks, "fp64", EXACT)
    # one sample on two ranks: strategies that gather in their passes took fillers, DDP none
    assert two_ranks["fp64 full zero3"]["num_fillers"] > 0
    assert two_ranks["fp64 full ddp"]["num_fillers"] == 0
    counts = [
        two_ranks[f"fp64 full zero3{tokens}"]["num_accumulated"] for tokens in (" 5000 tokens", "", " 250 tokens")
    ]
    assert counts == [1, 2, 4]


def check_fp32(two_ranks: dict[str, dict[str, Any]]) -> None:
    assert_close(two_ranks, "fp32", {"loss": 1e-6, "norm": 1e-6, "grads": 1e-6, "weights": 1e-6, "eval": 1e-6})


def check_quantized_bases(two_ranks: dict[str, dict[str, Any]]) -> None:
    # after two steps from zero, B is little more than the signs of its gradients
    assert_close(two_ranks, "nf4", {"loss": 1e-6, "norm": 1e-6, "grads": 1e-6, "weights": 1e-4})
    # a last bit of difference before quantizing to float8 may move a value by a sixteenth
    assert_close(two_ranks, "fp8", {"loss": 1e-6, "norm": 1e-5, "grads": 1e-5, "weights": 1e-3})
    assert two_ranks["nf4 fp32 zero3 random"]["held"] == 0.5
    for storage in ("nf4", "fp8") if "fp8 fp32 zero3" in two_ranks else ("nf4",):
        whole, cut = (two_ranks[f"{storage} fp32 {strategy}"] for strategy in ("zero2", "zero3"))
        assert (whole["held"], cut["held"]) == (1.0, 0.5)
        # where the bytes wait changes no bit
        assert [whole[key] for key in EXACT] == [cut[key] for key in EXACT]


def check_sums_in_bf16(two_ranks: dict[str, dict[str, Any]]) -> None:
    assert_close(two_ranks, "bf16 sums", {"loss": 1e-10, "norm": 1e-2, "grads": 1e-2})
    # they were rounded indeed
    assert all(entry["grads"] > 1e-6 for name, entry in two_ranks.items() if name.startswith("bf16 sums"))


def check_low_bit(report: dict[str, dict[str, Any]], *weights: str) -> None:
    limits = {
        "fp32": {"loss": 1e-6, "norm": 1e-5, "grads": 1e-6, "weights": 1e-4, "eval": 1e-5},
        # steps of bf16 are 2^-8 wide
        "bf16": {"loss": 1e-3, "norm": 2e-2, "grads": 5e-2, "weights": 4e-3, "eval": 1e-3},
    }
    for each in weights:
        assert_close(report, f"8-bit moments, {each}", limits[each])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_shards_are_updated_to_the_same_bits(tmp_path, num_ranks):
    spawn(Path(__file__).with_name("low_bit_ranks.py"), {"folder": str(tmp_path)}, tmp_path, num_ranks, DEADLINE_S)


def test_two_ranks_equal_one(two_ranks):
    # one test: several would each run all cases, in the workers that share the suite
    for check in (check_fp64, check_fp32, check_quantized_bases, check_sums_in_bf16):
        check(two_ranks)
    check_low_bit(two_ranks, "fp32", "bf16")


@pytest.mark.exhaustive
def test_four_ranks_equal_one(four_ranks):
    assert_close(four_ranks, "fp64", EXACT)
    assert_close(four_ranks, "nf4", {"loss": 1e-6, "norm": 1e-6, "grads": 1e-6, "weights": 1e-4})
    check_low_bit(four_ranks, "bf16")
    assert four_ranks["nf4 fp32 hsdp offload"]["held"] == 0.5
