"""Losses over answers in plain torch, each written down a second time, over plain transformers' log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from flatout.data.token_store import TokenStore


class Answer:
    """One answer by a plain model: its log-probability s, its tokens n, and its log-ratio d to the reference."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, reference: float) -> None:
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        self.s, self.n = logprobs[mask[1:]].sum(), int(mask[1:].sum())
        self.d = self.s - reference


def plain_update(model: torch.nn.Module, loss: Tensor, lr: float) -> float:
    """One step of gradient descent by a loss, which is returned as a number."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0 if parameter.grad is None else lr * parameter.grad
    return loss.item()


def odds(mean: Tensor) -> Tensor:
    return torch.log(mean.exp() / (1 - mean.exp()))


# kind -> its settings, the loss of a pair, and an answer's reward
Form = tuple[dict[str, Any], Callable[..., Tensor], Callable[..., Tensor]]
PAIRS: dict[str, Form] = {
    "dpo": ({"kind": "dpo"}, lambda c, r: -logsigmoid(0.1 * (c.d - r.d)), lambda x: 0.1 * x.d),
    "dpo, smoothed": (
        {"kind": "dpo", "beta": 0.5, "label_smoothing": 0.2},
        lambda c, r: -0.8 * logsigmoid(0.5 * (c.d - r.d)) - 0.2 * logsigmoid(0.5 * (r.d - c.d)),
        lambda x: 0.5 * x.d,
    ),
    "dpo, robust": (
        {"kind": "dpo", "beta": 0.5, "label_smoothing": 0.2, "robust": True, "sft_weight": 0.1},
        lambda c, r: (
            (-0.8 * logsigmoid(0.5 * (c.d - r.d)) + 0.2 * logsigmoid(0.5 * (r.d - c.d))) / 0.6 - 0.1 * c.s / c.n
        ),
        lambda x: 0.5 * x.d,
    ),
    "ipo": (
        {"kind": "ipo", "beta": 0.2},
        lambda c, r: (c.d / c.n - r.d / r.n - 1 / 0.4) ** 2,
        lambda x: 0.2 * x.d / x.n,
    ),
    "dpo_norm": (
        {"kind": "dpo_norm"},
        lambda c, r: -logsigmoid(5.0 * (c.d / c.n - r.d / r.n)),
        lambda x: 5.0 * x.d / x.n,
    ),
    "orpo": (
        {"kind": "orpo", "beta": 0.3},
        lambda c, r: -c.s / c.n - 0.3 * logsigmoid(odds(c.s / c.n) - odds(r.s / r.n)),
        lambda x: 0.3 * x.s / x.n,
    ),
    "simpo": (
        {"kind": "simpo"},
        lambda c, r: -logsigmoid(2.0 * (c.s / c.n - r.s / r.n) - 1.0),
        lambda x: 2.0 * x.s / x.n,
    ),
    "simpo and SFT": (
        {"kind": "simpo", "beta": 2.5, "gamma": 0.5, "sft_weight": 0.7},
        lambda c, r: -logsigmoid(2.5 * (c.s / c.n - r.s / r.n) - 0.5) - 0.7 * c.s / c.n,
        lambda x: 2.5 * x.s / x.n,
    ),
    "cpo": (
        {"kind": "cpo", "beta": 0.05},
        lambda c, r: -logsigmoid(0.05 * (c.s - r.s)) - c.s / c.n,
        lambda x: 0.05 * x.s,
    ),
}
KTO: dict[str, dict[str, Any]] = {
    "kto": {"kind": "kto"},
    "kto, weighted": {"kind": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
}
SETTINGS = {name: form[0] for name, form in PAIRS.items()} | KTO


class PlainStep:
    """One step by a loss's own form, each document alone: loss, metrics by name, and gradients by parameter.

    `reference` gives the reference's log-probability of each sample; `answer_of` and `reference_of_other` the answer
    that KTO reads after each prompt, and what the reference says of it.
    """

    def __init__(
        self,
        model_dir: Path,
        store: TokenStore,
        sample_ids: Sequence[int],
        reference: Sequence[float],
        answer_of: Sequence[int] = (),
        reference_of_other: Sequence[float] = (),
        model: Any = None,
    ) -> None:
        self.model = model or AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        self._store, self._reference = store, reference
        self._answer_of, self._reference_of_other = answer_of, reference_of_other
        self.sample_ids = sorted(sample_ids)
        self.answers = [self._answer(sample_id) for sample_id in self.sample_ids]

    def _tokens(self, sample_id: int) -> tuple[Tensor, Tensor]:
        ids, mask = (torch.tensor(part.tolist()) for part in self._store.sample(sample_id).pair)
        return ids, mask

    def _answer(self, sample_id: int) -> Answer:
        return Answer(self.model, *self._tokens(sample_id), float(self._reference[sample_id]))

    def other(self, sample_id: int) -> Answer:
        """The prompt of a sample with the answer to another prompt."""
        (ids, mask), (other_ids, other_mask) = self._tokens(sample_id), self._tokens(int(self._answer_of[sample_id]))
        first, start = int(mask.int().argmax()), int(other_mask.int().argmax())
        parts = torch.cat([ids[:first], other_ids[start:]]), torch.cat([mask[:first], other_mask[start:]])
        return Answer(self.model, *parts, float(self._reference_of_other[sample_id]))

    def of(self, name: str) -> tuple[Tensor, dict[str, float]]:
        """The loss of the step, with its graph, and the metrics."""
        return self._kto(KTO[name]) if name in KTO else self._pairs(PAIRS[name])

    def _pairs(self, form: Form) -> tuple[Tensor, dict[str, float]]:
        _, loss_of, reward_of = form
        pairs = list(zip(self.answers[0::2], self.answers[1::2], strict=True))
        rewards = torch.tensor([[reward_of(one).item() for one in pair] for pair in pairs])
        return torch.stack([loss_of(*pair) for pair in pairs]).mean(), {
            "rewards/chosen": rewards[:, 0].mean().item(),
            "rewards/rejected": rewards[:, 1].mean().item(),
            "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean().item(),
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).double().mean().item(),
            "logps/chosen": sum(pair[0].s.item() for pair in pairs) / len(pairs),
            "logps/rejected": sum(pair[1].s.item() for pair in pairs) / len(pairs),
            "nll": sum(-pair[0].s.item() / pair[0].n for pair in pairs) / len(pairs),
        }

    def _kto(self, settings: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
        beta, good = settings.get("beta", 0.1), settings.get("desirable_weight", 1.0)
        bad = settings.get("undesirable_weight", 1.0)
        labels = [bool(self._store.extra["label"][sample_id]) for sample_id in self.sample_ids]
        with torch.no_grad():
            kl = max(0.0, float(np.mean([self.other(sample_id).d.item() for sample_id in self.sample_ids])))
        losses = [
            good * (1 - torch.sigmoid(beta * (one.d - kl))) if label else bad * (1 - torch.sigmoid(beta * (kl - one.d)))
            for one, label in zip(self.answers, labels, strict=True)
        ]
        found = {"kl": kl}
        for side, wanted in (("chosen", True), ("rejected", False)):
            own = [one for one, label in zip(self.answers, labels, strict=True) if label == wanted]
            if own:
                found[f"rewards/{side}"] = beta * sum(one.d.item() for one in own) / len(own)
                found[f"logps/{side}"] = sum(one.s.item() for one in own) / len(own)
        if len(set(labels)) > 1:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return torch.stack(losses).mean(), found

    def gradients(self, name: str) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        """The loss, the gradient of every parameter, and the metrics."""
        loss, metrics = self.of(name)
        named = dict(self.model.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        return loss.item(), dict(zip(named, grads, strict=True)), metrics
