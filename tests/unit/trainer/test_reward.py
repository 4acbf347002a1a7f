"""Models that score: against plain transformers (and PEFT) sequence classification, in fp64, one sample at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftModelForSequenceClassification, get_peft_model
from plain_losses import plain_update
from run_folders import as_after, require_equal
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from unit_store import write_units

from flatout.cli.main import main
from flatout.config.read import dump_config, make_config
from flatout.config.schema import Config
from flatout.data.token_store import TokenStore
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train
from tests.usual import usual

NUM_PAIRS, PER_STEP, NUM_STEPS, LR = 10, 4, 10, 0.05


@pytest.fixture(scope="module")
def pairs(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    return root, write_units(root, tiny.model_dir, [2] * NUM_PAIRS, name="pairs")


def config_of(tiny: Any, root: Path, folder: Path, *overrides: str, **sections: Any) -> Config:
    values = {
        "run_dir": str(folder),
        "device": "cpu",
        "method": "full",
        "seed": 3,
        "model": {"name": str(tiny.model_dir), "precision": "fp64"},
        "data": {"name": "pairs", "root": str(root)},
        "objective": {"kind": "reward", "margin": True, "centering": 0.01},
        "optim": {"name": "sgd", "lr": LR, "beta1": 0.0, "max_grad_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": None},
        **sections,
    }
    values["batch"] = {"samples_per_step": PER_STEP, "max_steps": NUM_STEPS, **sections.get("batch", {})}
    return make_config(values, overrides)


# the layout -> settings of `batch`, further arguments, and the least number of micro-batches
LAYOUTS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "packed": ({"micro_batch_tokens": 4000, "share_prefix": "off"}, [], 1),
    "shared, 3 micro-batches": ({"micro_batch_tokens": 190}, [], 3),
    "rows": ({"micro_batch_tokens": 600, "layout": "rows"}, [], 1),
    "2 ranks": ({"micro_batch_tokens": 4000}, ["gpus=[0,1]"], 1),
    "2 ranks, fsdp": ({"micro_batch_tokens": 4000}, ["gpus=[0,1]", "strategy=fsdp"], 1),
    "2 ranks, zero2": ({"micro_batch_tokens": 190}, ["gpus=[0,1]", "strategy=zero2"], 1),
}
CASES = [(method, layout) for method in ("full", "lora") for layout in LAYOUTS]
WITH_THE_SUITE = [("full", "packed"), ("lora", "shared, 3 micro-batches"), ("lora", "2 ranks")]


def first_score(size: int, seed: int = 3, num_scores: int = 1) -> torch.Tensor:
    """The documented start of a new `score`: normal with the model's initializer_range, by the run's seed."""
    return 0.02 * torch.randn(num_scores, size, generator=torch.Generator().manual_seed(seed))


def plain_scorer(folder: Path, adapter: Path | None = None) -> Any:
    """transformers' own model as a person makes it, with a PEFT adapter or a first score of its own."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)
    if adapter is None:
        with torch.no_grad():
            model.score.weight.copy_(first_score(model.config.hidden_size))
        return model
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """An adapter for sequence classification that PEFT has made and written; its B is not zero."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    settings = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(plain_scorer(tiny.model_dir), settings)
    for name, own in model.named_parameters():
        own.data *= 0.1 if "lora_B" in name else 1  # products of large factors amplify every rounding
    model.save_pretrained(folder)
    return folder


def score_of(model: Any, store: TokenStore, sample_id: int) -> torch.Tensor:
    ids, _ = (torch.tensor(part.tolist()) for part in store.sample(sample_id).pair)
    scores: torch.Tensor = model(input_ids=ids[None]).logits[0, 0]
    return scores


@pytest.fixture(scope="module")
def expected(tiny, pairs, adapter, tmp_path_factory):
    """Ten steps of plain transformers and PEFT, one sample at a time: losses, the last metrics, and all weights."""
    root, store = pairs
    plan = open_and_plan(config_of(tiny, root, tmp_path_factory.mktemp("plan")), Reporter(), Rank()).plan

    @cache
    def find(method: str) -> dict[str, Any]:
        model = plain_scorer(tiny.model_dir, adapter if method == "lora" else None)
        losses = []
        for step in plan.steps():
            units = sorted({sample_id // 2 for sample_id in step.sample_ids})
            scores = torch.stack([score_of(model, store, 2 * unit + place) for unit in units for place in (0, 1)])
            chosen, rejected = scores[::2], scores[1::2]
            margins = torch.from_numpy(store.extra["margin"][units])
            loss = (-logsigmoid(chosen - rejected - margins) + 0.01 * (chosen + rejected) ** 2).mean()
            losses.append(plain_update(model, loss, LR))
        metrics = {
            "accuracy": (chosen > rejected).double().mean().item(),
            "margin": (chosen - rejected).mean().item(),
            "mean_reward": scores.mean().item(),
        }
        return {"losses": losses, "metrics": metrics, "model": model.eval()}

    return find


@pytest.mark.parametrize(("method", "layout"), usual(CASES, WITH_THE_SUITE))
def test_reward_and_its_gradients_are_those_of_transformers_and_peft(
    tiny, pairs, adapter, expected, tmp_path, metrics_of, method, layout
):
    batch, more, least = LAYOUTS[layout]
    lora = {"lora": {"rank": 4, "alpha": 8, "continue_from": str(adapter)}} if method == "lora" else {}
    config = config_of(tiny, pairs[0], tmp_path / "run", method=method, batch=batch, **lora)
    (tmp_path / "run.yaml").write_text(dump_config(config, only_given=True))
    assert main(["train", str(tmp_path / "run.yaml"), *more]) == 0
    lines, plain = metrics_of(tmp_path / "run"), expected(method)
    assert lines[0]["num_micro_batches"] >= least
    # rotary cosines are computed in fp32
    assert [one["loss"] for one in lines] == pytest.approx(plain["losses"], rel=1e-6)
    assert lines[-1]["metrics"] == pytest.approx(plain["metrics"], rel=1e-5, abs=1e-6)
    # what was written loads by plain transformers and PEFT, and scores padded batches alike
    final, tokenizer = tmp_path / "run/final", AutoTokenizer.from_pretrained(tmp_path / "run/final")
    if method == "full":
        ours = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float64)
    else:
        base = AutoModelForSequenceClassification.from_pretrained(
            tiny.model_dir, config=AutoConfig.from_pretrained(final), dtype=torch.float64
        )
        ours = PeftModelForSequenceClassification.from_pretrained(base, final)
        assert ours.peft_config["default"].task_type == "SEQ_CLS"
    for name, own in plain["model"].named_parameters():
        assert not own.requires_grad or torch.allclose(ours.get_parameter(name), own, rtol=0, atol=1e-6), name
    texts = ["one", "a longer text of words", "and two"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    alone = [plain["model"](**tokenizer([text], return_tensors="pt")).logits for text in texts]
    assert torch.allclose(ours.eval()(**batch).logits, torch.cat(alone), rtol=1e-5)


def test_a_stopped_run_over_nf4_resumes_to_the_bit(tiny, pairs, tmp_path):
    config = config_of(
        tiny, pairs[0], tmp_path / "run", method="lora", base={"storage": "nf4"}, optim={"lr": 1e-3},
        model={"name": str(tiny.model_dir), "precision": "fp32"}, checkpoint={"every_steps": 2}, batch={"max_steps": 4},
    )  # fmt: skip
    adapter = tmp_path / "run/final/adapter_model.safetensors"
    train(config)
    whole = load_file(adapter)
    as_after(tmp_path / "run", 2)
    train(config)
    assert '"resumed"' in (tmp_path / "run/events.jsonl").read_text()
    require_equal(load_file(adapter), whole)
    assert "base_model.model.score.weight" in whole
