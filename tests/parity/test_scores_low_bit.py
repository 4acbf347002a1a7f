"""Scores over frozen weights in 8 and 4 bits: what is trained is what plain transformers and PEFT compute with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModelForSequenceClassification
from tiny_models import save_tiny_model
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification
from unit_store import write_units

from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.models.blocks import decoder_layers
from flatout.models.frozen.frozen_linear import Fp8Linear, Nf4Linear
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]
# the base, and how far off scores may be, as a share of the largest: inputs of float8 matmuls are rounded too
BASES: dict[str, tuple[dict[str, str], float]] = {
    "nf4": ({"storage": "nf4"}, 1e-4),
    "nf4, float8 matmuls": ({"storage": "nf4", "compute": "fp8"}, 0.1),
    "fp8": ({"storage": "fp8"}, 0.1),
}
LABELS = ("bad", "good", "so-so")


def config_of(tiny: Any, folder: Path, kind: str, device: str, base: dict[str, str]) -> Config:
    model = folder / "model"
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "vocab_size": 512}
    save_tiny_model(model, "qwen3", **shape, initializer_range=0.05)
    for file in (*tiny.model_dir.glob("*token*"), *tiny.model_dir.glob("chat_template*")):
        (model / file.name).write_bytes(file.read_bytes())
    data: dict[str, Any] = {"name": "d", "root": str(folder)}
    if kind == "reward":
        write_units(folder, model, [2] * 16, name="d")
    else:
        rows = [f'{{"text": "This is {LABELS[k % 3]} text {k}.", "label": "{LABELS[k % 3]}"}}\n' for k in range(24)]
        (folder / "rows.jsonl").write_text("".join(rows))
        data["sources"] = [{"path": str(folder / "rows.jsonl")}]
    return make_config(
        {
            "run_dir": str(folder / "run"),
            "device": device,
            "model": {"name": str(model), "precision": "bf16" if device == "cuda" else "fp32"},
            "data": data,
            "objective": kind,
            "base": base,
            "lora": {"rank": 8},
            "optim": {"lr": 5e-3},
            "batch": {"samples_per_step": 6, "micro_batch_tokens": 700, "max_steps": 12},
            "eval": {"fraction": 0.25, "every_steps": 1, "prompts": []},
        }
    )


def plain_scorer(model: Path, final: Path, storage: str) -> Any:
    """transformers' own model with PEFT's adapter, whose linear layers have the stored weights, made dense."""
    config = AutoConfig.from_pretrained(final)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, config=config, dtype=torch.float32)
    for layer in decoder_layers(scorer):
        for linear in [each for each in layer.modules() if isinstance(each, nn.Linear)]:
            own = linear.weight.detach()
            stored = Fp8Linear(own, None) if storage == "fp8" else Nf4Linear.from_dense(own, None)
            linear.weight.data = stored.weight.detach().clone()
    return PeftModelForSequenceClassification.from_pretrained(scorer, final).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("base", "kind"),
    [
        # the head of each kind, and each base once; the product with -m exhaustive
        pytest.param(base, kind, marks=() if (kind == "classify") == (base == "fp8") else pytest.mark.exhaustive)
        for base in BASES
        for kind in ("reward", "classify")
    ],
)
def test_a_base_in_few_bits_trains_scores(
    tiny: Any, tmp_path: Path, metrics_of: Any, base: str, kind: str, device: str
) -> None:
    settings, share = BASES[base]
    share = max(share, 0.03) if device == "cuda" else share
    config = config_of(tiny, tmp_path, kind, device, settings)
    (evaluated,) = open_and_plan(config, Reporter(), Rank()).eval_sets
    train(config)
    losses = [step["loss"] for step in metrics_of(tmp_path / "run")]
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2])
    scorer = plain_scorer(tmp_path / "model", tmp_path / "run" / "final", settings["storage"])
    with torch.no_grad():
        ids = [torch.tensor(evaluated.store.sample(i).token_ids.tolist()) for i in evaluated.step.sample_ids]
        scores = torch.cat([scorer(input_ids=each[None]).logits for each in ids])
    last = metrics_of(tmp_path / "run", "eval")[-1]
    scale = scores.abs().max().item()
    if kind == "reward":
        chosen, rejected = scores[::2, 0], scores[1::2, 0]
        expected = {"mean_reward": scores.mean().item(), "margin": (chosen - rejected).mean().item()}
        assert {name: last["metrics"][name] for name in expected} == pytest.approx(expected, abs=share * scale)
        expected_loss = -logsigmoid(chosen - rejected).mean().item()
    else:
        classes = torch.tensor([int(evaluated.store.extra["class"][i]) for i in evaluated.step.sample_ids])
        expected_loss = cross_entropy(scores, classes).item()
    assert last["eval_loss"] == pytest.approx(expected_loss, abs=2 * share * scale)
