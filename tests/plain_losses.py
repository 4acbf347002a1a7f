"""Losses over answers in plain torch, each written down a second time, over plain transformers' log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from flatout.config.objective import class_of_kind
from flatout.data.token_store import TokenStore


class Answer:
    """One answer by a plain model: its log-probability s, its tokens n, and its log-ratio d to the reference."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, reference: float) -> None:
        self.logits, self.ids = model(ids[None]).logits[0, :-1][mask[1:]], ids[1:][mask[1:]]
        self.s, self.n = self.logprobs().sum(), len(self.ids)
        self.d = self.s - reference

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """The log-probability of each label token (n,)."""
        return (self.logits / temperature).log_softmax(-1).gather(-1, self.ids[:, None])[:, 0]


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


class Rollout:
    """One sampled answer: l of its tokens (n,), and the columns of the data set at them."""

    def __init__(self, answer: Answer, temperature: float, columns: dict[str, Tensor]) -> None:
        self.l, self.entropy = answer.logprobs(temperature), Categorical(logits=answer.logits / temperature).entropy()
        self.A, self.sampler, self.old, self.reference = (columns[name].double() for name in TOKEN_COLUMNS)
        self.answers, self.n = float(columns["answers"]), answer.n

    def clipped(self, low: float, high: float) -> Tensor:
        r = (self.l - self.old).exp()
        return -self.A * torch.where(self.A > 0, r.clamp(max=1 + high), r.clamp(min=1 - low))

    def weighted(self, low: float, high: float) -> Tensor:
        return -(self.l.detach() - self.old).exp().clamp(1 - low, 1 + high) * self.A * self.l

    def sequence(self, low: float, high: float) -> Tensor:
        s = (self.l - self.old).mean().exp()
        clip, tokens = s.detach().clamp(1 - low, 1 + high), s.detach() * (self.l - self.l.detach()).exp()
        clip = tokens.where(clip == s.detach(), clip)
        return torch.stack([-torch.min(one * a, other * a) for one, other, a in zip(tokens, clip, self.A, strict=True)])

    def dual(self, low: float, high: float, dual: float) -> Tensor:
        plain = self.clipped(low, high)
        return torch.where((self.A < 0) & (plain > -dual * self.A), -dual * self.A, plain)


TOKEN_COLUMNS = ("advantage", "sampler_logprob", "policy_logprob", "reference_token_logprob")
# kind and its settings, an answer's share of the sum, and what divides the sum
POLICIES: dict[str, tuple[dict[str, Any], Callable[[Rollout], Tensor], str]] = {
    "grpo": ({"kind": "grpo"}, lambda x: x.clipped(0.2, 0.2).mean(), "answers"),
    "grpo, kl": (
        {"kind": "grpo", "kl": 0.3, "entropy": 0.2, "temperature": 0.7},
        lambda x: (x.clipped(0.2, 0.2) + 0.15 * (x.l - x.reference) ** 2 - 0.2 * x.entropy).mean(),
        "answers",
    ),
    "dr_grpo": ({"kind": "dr_grpo", "longest": 80}, lambda x: x.clipped(0.2, 0.2).sum() / 80, "answers"),
    "dapo": ({"kind": "dapo"}, lambda x: x.clipped(0.2, 0.28).sum(), "tokens"),
    "dapo, dual": (
        {"kind": "dapo", "clip_low": 0.1, "clip_high": None, "clip_dual": 1.2},
        lambda x: x.dual(0.1, 1e9, 1.2).sum(),
        "tokens",
    ),
    "gspo": (
        {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.1},
        lambda x: x.sequence(0.05, 0.1).mean(),
        "answers",
    ),
    "gspo, tokens": (
        {"kind": "gspo", "normalize_by": "tokens"},
        lambda x: x.sequence(3e-4, 4e-4).sum(),
        "tokens",
    ),
    "cispo": ({"kind": "cispo", "clip_high": 0.2, "temperature": 1.4}, lambda x: x.weighted(1e9, 0.2).sum(), "tokens"),
    "cispo, low": (
        {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.3},
        lambda x: x.weighted(0.1, 0.3).sum(),
        "tokens",
    ),
    "rloo": ({"kind": "rloo"}, lambda x: -(x.A * x.l).sum(), "answers"),
    "reinforce": ({"kind": "reinforce"}, lambda x: -(x.A * x.l).sum(), "answers"),
}
SETTINGS = {name: form[0] for name, form in PAIRS.items()} | KTO | {name: form[0] for name, form in POLICIES.items()}


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
        if name in POLICIES:
            return self._policy(*POLICIES[name])
        return self._kto(KTO[name]) if name in KTO else self._pairs(PAIRS[name])

    def _policy(
        self, settings: dict[str, Any], share: Callable[[Rollout], Tensor], per: str
    ) -> tuple[Tensor, dict[str, float]]:
        rollouts = []
        for sample_id, answer in zip(self.sample_ids, self.answers, strict=True):
            read = self._store.sample(sample_id, [*TOKEN_COLUMNS, "answers"])
            columns = {
                name: torch.tensor(values[1:][read.loss_mask[1:]] if values.ndim else values)
                for name, values in read.columns.items()
            }
            rollouts.append(Rollout(answer, settings.get("temperature", 1.0), columns))
        count = sum(one.n for one in rollouts)
        loss = sum(map(share, rollouts)) / (count if per == "tokens" else sum(one.answers for one in rollouts))
        return loss, _policy_metrics(rollouts, settings)

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


def _policy_metrics(rollouts: Sequence[Rollout], settings: dict[str, Any]) -> dict[str, float]:
    loss = class_of_kind(settings["kind"])(**{name: value for name, value in settings.items() if name != "kind"})
    now, old, sampler, reference, a, entropy = (
        torch.cat([getattr(one, name).detach() for one in rollouts])
        for name in ("l", "old", "sampler", "reference", "A", "entropy")
    )
    metrics = {
        "entropy": entropy,
        "kl/old": (now - old).exp() - 1 - (now - old),
        "mismatch/k1": sampler - now,
        "mismatch/k3": (now - sampler).exp() - 1 - (now - sampler),
        "mismatch/over_2x": (now - sampler > math.log(2)) | (sampler - now > math.log(2)),
    }
    largest = {"mismatch/max": torch.max((now - sampler).exp(), (sampler - now).exp()).max().item()}
    if loss.kl:
        metrics["kl/reference"] = (reference - now).exp() - 1 - (reference - now)
    if loss.ratio != "none":
        means = [(one.l - one.old).detach().mean().expand(one.n) for one in rollouts]
        r = (torch.cat(means) if loss.ratio == "sequence" else now - old).exp()
        below = r < 1 - (math.inf if loss.clip_low is None else loss.clip_low)
        above = r > 1 + (math.inf if loss.clip_high is None else loss.clip_high)
        is_weight = loss.ratio == "clipped_weight"
        metrics["clip_share/low"] = below if is_weight else below & (a < 0)
        metrics["clip_share/high"] = above if is_weight else above & (a > 0)
        largest["ratio/max"] = r.max().item()
    return largest | {name: values.double().mean().item() for name, values in metrics.items()}
