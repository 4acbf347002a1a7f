"""Losses over answers equal those of TRL where the formula is the same, and the tests say where it is not.

TRL is not needed by flatout; the tests skip without it: `pip install trl==1.16.0` and `pytest -m exhaustive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench.samples import write_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from flatout.config.objective import class_of_kind
from flatout.config.schema import ModelConfig
from flatout.models.blocks import hidden_states
from flatout.models.load.model import Loading, load_model
from flatout.models.model_with_loss import ModelWithLoss
from flatout.models.packed import BatchColumns, PackedBatch, flatten_samples, rows_of_positions
from flatout.models.scoring import ONE_SCORE, Scoring
from flatout.models.token_head import TokenHead
from flatout.objectives.kto import KTO
from flatout.objectives.loss_inputs import LabelTokens
from flatout.objectives.preference import Answers
from flatout.objectives.reward import Reward

pytest.importorskip("trl")
pytestmark = pytest.mark.exhaustive
CPU = torch.device("cpu")
PROMPT, CHOSEN, REJECTED = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip


def logprobs(model: Any, answer: list[int], prompt: Sequence[int] = PROMPT) -> Tensor:
    """The sum of an answer's log-probabilities by a plain forward pass."""
    ids = torch.tensor([[*prompt, *answer]])
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


# prompts with answers of several lengths, so that TRL's batch is padded
ROWS = [([5, 6, 7], [10, 11]), ([8, 9], [12, 13, 14, 15]), ([20, 21, 22, 23], [24]), ([5, 9, 11], [30, 31, 32])]


def written(folder: Path, auto: Any, seed: int, **config: Any) -> tuple[Path, Any]:
    """A model with large random weights, and its folder."""
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model("llama", **SHAPE, **config), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, model


def packed(rows: list[tuple[list[int], list[int]]], unit_size: int, columns: dict[str, list[float]]) -> PackedBatch:
    """Prompts and answers as one packed batch, with what an objective asks of it."""
    samples = [(np.array(prompt + answer), np.arange(len(prompt + answer)) >= len(prompt)) for prompt, answer in rows]
    batch = flatten_samples(samples)
    per_unit = {name: torch.tensor(own).double() for name, own in columns.items() if len(own) < len(rows)}
    loss_columns = BatchColumns(
        torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(answer) for _, answer in rows])),
        torch.arange(len(rows)) // unit_size,
        len(rows) // unit_size,
        torch.from_numpy(rows_of_positions(batch, [len(ids) - 1 for ids, _ in samples], ())),
        per_sample={name: torch.tensor(own).double() for name, own in columns.items() if name not in per_unit},
        per_unit=per_unit,
    )
    return replace(batch, loss_columns=loss_columns)


def compare(told: Tensor, theirs: Any, mine: Tensor, loaded: Any) -> None:
    """The loss and the gradient of every weight."""
    assert mine.item() == pytest.approx(told.item(), rel=2e-5)
    told.backward()
    mine.backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(loaded.model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weights", [{}, {"desirable_weight": 2.0, "undesirable_weight": 0.5}])
def test_kto_trainer(tmp_path: Path, weights: dict[str, float]) -> None:
    """One micro-batch whose answers are paired alike; with two, TRL has a z of each, and so another loss."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    class Trainer(KTOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # it has token ids

    (folder, model), (_, reference) = (written(tmp_path / str(seed), AutoModelForCausalLM, seed) for seed in (1, 0))
    labels = [True, False, True, True]

    def batch_of(places: list[int]) -> list[dict[str, Any]]:
        others = places[-1:] + places[:-1]
        return [
            {"prompt_ids": ROWS[own][0], "completion_ids": ROWS[own][1], "KL_completion_ids": ROWS[other][1],
             "label": labels[own]}
            for own, other in zip(places, others, strict=True)
        ]  # fmt: skip

    args = KTOConfig(
        str(tmp_path), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        per_device_train_batch_size=4, beta=1.0, **weights,
    )  # fmt: skip
    trainer = Trainer(
        model=model, ref_model=reference, args=args, train_dataset=Dataset.from_list(batch_of([0, 1, 2, 3])),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    steps = ([0, 1, 2, 3], [0, 1], [2, 3])
    whole, *parts = [trainer.compute_loss(model, trainer.data_collator(batch_of(places))) for places in steps]

    loaded = load_model(ModelConfig(name=str(folder), precision="fp32"), method="full", device=CPU, seed=0)
    loss = ModelWithLoss(loaded.model, objective=KTO.of({"beta": 1.0, **weights}))
    kl_pairs = [(ROWS[own][0], ROWS[own - 1][1]) for own in range(4)]
    own, other = ([logprobs(reference, answer, prompt).item() for prompt, answer in rows] for rows in (ROWS, kl_pairs))
    others = packed(kl_pairs, 1, {"reference_logprob": other})
    with torch.no_grad():
        states = hidden_states(loaded.model, others)
        estimated = loss.objective.estimate(LabelTokens(states, others, TokenHead(loaded.model, 64)))["kl"] / 4
    assert estimated.item() > 0
    told = [float(label) for label in labels]
    mine, *_ = loss(
        packed(ROWS, 1, {"reference_logprob": own, "label": told, "undesirable": [1 - one for one in told]}),
        estimates={"kl": estimated},
    )
    assert (sum(parts) / 2).item() != pytest.approx(whole.item(), rel=1e-3)
    compare(whole, model, mine / 4, loaded)


@pytest.mark.parametrize("centering", [0.0, 0.01])
@pytest.mark.parametrize("margin", [False, True])
def test_reward_trainer(tmp_path: Path, margin: bool, centering: float) -> None:
    """Several pairs of several lengths, which TRL pads."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    class Trainer(RewardTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # it has token ids

    folder, model = written(tmp_path / "model", AutoModelForSequenceClassification, 0, num_labels=1)
    margins = {"margin": [0.5, 1.5]} if margin else {}
    pairs = [
        {name: [*chain(*ROWS[2 * k + place])] for place, name in enumerate(("chosen_ids", "rejected_ids"))}
        | {name: values[k] for name, values in margins.items()}
        for k in range(2)
    ]
    args = RewardConfig(
        str(tmp_path), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        per_device_train_batch_size=2, center_rewards_coefficient=centering or None,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    model.config.pad_token_id = 0
    told = trainer.compute_loss(model, trainer.data_collator(pairs))
    config, scoring = ModelConfig(name=str(folder), precision="fp32"), Scoring(ONE_SCORE, 0)
    loaded = load_model(config, method="full", device=CPU, seed=0, how=Loading(scoring=scoring))
    loss = ModelWithLoss(loaded.model, objective=Reward.of({"margin": margin, "centering": centering}))
    mine, *_ = loss(packed(ROWS, 2, margins))
    compare(told, model, mine / 2, loaded)
