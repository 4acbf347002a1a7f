"""Losses of pairs equal those of TRL, of one pair a batch without padding, where the formula is the same.

TRL is not needed by flatout; the tests skip without it: `pip install trl==1.16.0` and `pytest -m exhaustive`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flatout.bench.inputs import write_tokenizer
from flatout.config.objective import class_of_kind
from flatout.objectives.preference import Answers

pytest.importorskip("trl")
pytestmark = pytest.mark.exhaustive
PROMPT, CHOSEN, REJECTED = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip


def logprobs(model: Any, answer: list[int]) -> Tensor:
    """The sum of an answer's log-probabilities by a plain forward pass."""
    ids = torch.tensor([[*PROMPT, *answer]])
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[-len(answer) :].sum()


def models() -> tuple[Any, Any]:
    """A model, and a reference that differs from it."""
    config = AutoConfig.for_model("llama", **SHAPE)
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        for parameter in made[-1].parameters():
            parameter.data = torch.randn_like(parameter) * 0.2
    return made[0], made[1]


def ours(kind: str, fields: dict[str, float], model: Any, reference: Any) -> Tensor:
    objective = class_of_kind(kind).of(fields)
    needs = bool(objective.columns)
    answers = []
    for answer in (CHOSEN, REJECTED):
        with torch.no_grad():
            by_reference = logprobs(reference, answer)[None] if needs else None
        answers.append(Answers(logprobs(model, answer)[None], torch.tensor([float(len(answer))]), by_reference))
    chosen, rejected = answers
    return (objective.losses(chosen, rejected) - objective.sft_weight * chosen.mean).mean()


def gradients(loss: Tensor, model: Any) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("theirs", "kind", "fields"),
    [
        ({"loss_type": ["sigmoid"], "beta": 0.1}, "dpo", {"beta": 0.1}),
        ({"loss_type": ["robust"], "label_smoothing": 0.2}, "dpo", {"label_smoothing": 0.2, "robust": True}),
        ({"loss_type": ["ipo"], "beta": 0.3}, "ipo", {"beta": 0.3}),
        ({"loss_type": ["sigmoid_norm"], "beta": 5.0}, "dpo_norm", {"beta": 5.0}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]}, "dpo", {"sft_weight": 0.4}),
    ],
)
def test_dpo_trainer(tmp_path: Path, theirs: dict[str, Any], kind: str, fields: dict[str, Any]) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # it has token ids

    write_tokenizer(tmp_path / "tokenizer")
    model, reference = models()
    row = {"prompt_ids": PROMPT, "chosen_ids": CHOSEN, "rejected_ids": REJECTED}
    args = DPOConfig(
        str(tmp_path), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        per_device_train_batch_size=1, **theirs,
    )  # fmt: skip
    trainer = Trainer(
        model=model, ref_model=reference, args=args, train_dataset=Dataset.from_list([row]),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "tokenizer"),
    )  # fmt: skip
    model.config.pad_token_id = 0
    told = trainer.compute_loss(model, trainer.data_collator([row]))
    mine = ours(kind, fields, model, reference)
    assert mine.item() == pytest.approx(told.item(), rel=2e-5)
    for one, other in zip(gradients(told, model), gradients(mine, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields", "theirs"),
    [
        ("cpo", {"beta": 0.2, "sft_weight": 0.0}, {"loss_type": "sigmoid", "beta": 0.2, "simpo_gamma": 0.5}),
        ("simpo", {"beta": 2.0, "gamma": 1.5}, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.5}),
    ],
)
def test_cpo_trainer(kind: str, fields: dict[str, Any], theirs: dict[str, Any]) -> None:
    from trl.experimental.cpo import CPOTrainer

    model, reference = models()
    trainer = SimpleNamespace(alpha=0.0, label_smoothing=0.0, accelerator=SimpleNamespace(device="cpu"), **theirs)
    scale = 1 / len(CHOSEN) if kind == "simpo" else 1.0
    told, _, _ = CPOTrainer.cpo_loss(trainer, *(logprobs(model, answer)[None] * scale for answer in (CHOSEN, REJECTED)))
    assert ours(kind, fields, model, reference).item() == pytest.approx(told.item(), rel=2e-5)


def test_orpo_trainer() -> None:
    """Without the chosen answer's cross-entropy, which is over its prompt too there."""
    from trl.experimental.orpo import ORPOTrainer

    model, reference = models()
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    means = [logprobs(model, answer)[None] / len(answer) for answer in (CHOSEN, REJECTED)]
    told = -ORPOTrainer.odds_ratio_loss(trainer, *means)[0].mean()
    mine = ours("orpo", {"beta": 0.3, "sft_weight": 0.0}, model, reference)
    assert mine.item() == pytest.approx(told.item(), rel=2e-5)
