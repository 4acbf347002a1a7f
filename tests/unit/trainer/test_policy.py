"""Policy losses where everything can be enumerated: three actions, groups of two, one update of staleness."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM
from unit_store import write_groups

from flatout.cli.main import main
from flatout.config.objective import class_of_kind
from flatout.config.rollout import RolloutConfig
from flatout.errors import UsageError
from flatout.objectives.policy import Baseline
from flatout.rollout.advantages import BASELINES, make_advantages

LOGITS, REWARDS = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64), [1.0, 0.0, 2.5]
REFERENCE = torch.tensor([1.0, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
GROUPS = list(product(range(3), repeat=2))


def policy(logits: Tensor = LOGITS) -> Tensor:
    return logits.clone().requires_grad_()


def sums_of(
    kind: str, logits: Tensor, action: int, advantage: float, old: Tensor, **settings: Any
) -> dict[str, Tensor]:
    """The objective's sums over one answer of one token."""
    columns = {
        "advantage": torch.tensor([advantage], dtype=torch.float64),
        "sampler_logprob": old[[action]],
        "policy_logprob": old[[action]],
        "reference_token_logprob": REFERENCE[[action]],
    }
    tokens: Any = SimpleNamespace(
        logprobs_at=lambda temperature: (logits / temperature).log_softmax(-1)[[action]],
        entropy_at=lambda temperature, with_graph: Categorical(logits=logits / temperature).entropy()[None],
        column=columns.__getitem__,
        by_sample=lambda values: values,
        sample_lengths=torch.ones(1, dtype=torch.int64),
        batch=SimpleNamespace(label_samples=torch.zeros(1, dtype=torch.int64)),
    )
    sums: dict[str, Tensor] = class_of_kind(kind)(**settings)(tokens)
    return sums


def gradient(value: Tensor, logits: Tensor) -> list[float]:
    return list(torch.autograd.grad(value, logits, retain_graph=True)[0].tolist())


def reward_gradient(logits: Tensor) -> list[float]:
    return gradient(-(logits.softmax(-1) * torch.tensor(REWARDS)).sum(), logits)


# what the expected gradient is of the exact one: the mean of a group has the answer's own reward in it
SCALES = {"leave_one_out": 1.0, "mean": 0.5, "batch_mean": 0.5, "none": 1.0}


@pytest.mark.parametrize("baseline", SCALES)
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_the_estimate_is_the_policy_gradient_in_expectation(kind, baseline):
    """At ratio 1 every form is the policy gradient; groups without a signal count in the mean over answers."""
    logits, expected = policy(), torch.zeros((), dtype=torch.float64)
    old = logits.detach().log_softmax(-1)
    for group in GROUPS:
        found = make_advantages(np.array([REWARDS[action] for action in group]), np.array([2]), baseline)
        for action, value in zip(group, found.values, strict=True):
            settings = {"longest": 1} if kind == "dr_grpo" else {}
            loss = sums_of(kind, logits, action, value, old, **settings)["loss"]
            expected = expected + old[list(group)].sum().exp() * loss / 2
    exact = [SCALES[baseline] * value for value in reward_gradient(logits)]
    assert gradient(expected, logits) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dapo", "gspo", "rloo", "cispo"])
def test_after_one_update_only_ratios_correct_for_it(kind):
    """Inside of the clip, r A of draws from the old policy is the new policy's gradient; without r, another's."""
    old = policy()
    logits = policy((LOGITS - 0.05 * torch.tensor(reward_gradient(old))).double())
    logprobs, clip = old.detach().log_softmax(-1), {} if kind == "rloo" else {"clip_low": 0.1, "clip_high": 0.1}
    assert 1e-3 < (logits.log_softmax(-1) - logprobs).abs().max() < 0.1
    losses = [sums_of(kind, logits, a, REWARDS[a], logprobs, **clip)["loss"] for a in range(3)]
    found = gradient((logprobs.exp() * torch.stack(losses)).sum(), logits)
    exact = pytest.approx(reward_gradient(logits), abs=1e-12)
    assert (found == exact) == (kind != "rloo")


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [
        (1.5, 1.0, False),
        (1.5, -1.0, True),
        (0.5, 1.0, True),
        (0.5, -1.0, False),
        (1.24, 1.0, True),
        (0.76, -1.0, False),
    ],
)
def test_a_side_of_the_clip_holds_its_own_sign_of_the_advantage(ratio, advantage, flows):
    logits = policy()
    old = logits.detach().log_softmax(-1) - torch.tensor(ratio).log()
    sums = sums_of("dapo", logits, 0, advantage, old)
    assert any(gradient(sums["loss"], logits)) == flows
    assert sums["clip_share/high"].item() == (ratio == 1.5 and not flows)
    assert sums["clip_share/low"].item() == (ratio < 1 and not flows)


def test_k2_has_the_gradient_of_the_reverse_kl_and_its_metrics_are_kls_in_expectation():
    logits = policy()
    logprobs = logits.log_softmax(-1)
    weights, kl = logprobs.exp().detach(), (logprobs.exp() * (logprobs - REFERENCE)).sum()
    sums = [sums_of("grpo", logits, a, 0.0, REFERENCE, kl=0.7) for a in range(3)]
    mean = {name: (weights * torch.stack([one[name] for one in sums])).sum() for name in sums[0]}
    assert gradient(mean["loss"], logits) == pytest.approx([0.7 * g for g in gradient(kl, logits)], abs=1e-12)
    assert mean["kl/reference"].item() == pytest.approx(kl.item(), abs=1e-12)
    differences = REFERENCE - logits.log_softmax(-1)
    k3 = (weights * (differences.exp() - 1 - differences)).sum()
    assert gradient(k3, logits) != pytest.approx(gradient(kl, logits), rel=0.1)
    # draws from the sampler: KL(sampler, policy)
    drawn = {name: (REFERENCE.exp() * torch.stack([one[name] for one in sums])).sum().item() for name in sums[0]}
    forward = (REFERENCE.exp() * (REFERENCE - logprobs.detach())).sum().item()
    assert [drawn[name] for name in ("kl/old", "mismatch/k1", "mismatch/k3")] == pytest.approx([forward] * 3, abs=1e-12)


def test_rewards_become_advantages():
    """By hand, groups of any size: an answer without a reward is in no mean, one that is masked is; equal is equal."""
    nan = float("nan")
    rewards = np.array([1, 0, 0, nan, 0.1, 0.1, 0.1, 3, 1, 5, nan])
    sizes, is_masked = np.array([4, 3, 2, 1, 1]), np.arange(11) == 8
    std, half = 1 / 3**0.5, 2**0.5
    expected = {
        "mean_std": [
            2 / 3 / (std + 1e-4),
            *[-1 / 3 / (std + 1e-4)] * 2,
            0,
            0,
            0,
            0,
            1 / (half + 1e-4),
            -1 / (half + 1e-4),
        ],
        "mean": [2 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0, 1, -1],
        "leave_one_out": [1, -0.5, -0.5, 0, 0, 0, 0, 2, -2],
    }
    for baseline, values in expected.items():
        found = make_advantages(rewards, sizes, baseline, is_masked=is_masked)
        assert found.values.tolist() == pytest.approx([*values, 0, 0])
        assert np.flatnonzero(found.is_kept).tolist() == [0, 1, 2, 7]
        assert (found.num_dropped, found.count) == (3, 2.0), "one group has no score, which counts in no mean"
    found = make_advantages(rewards, sizes, "batch_mean")
    assert found.values[found.is_kept] == pytest.approx(rewards[~np.isnan(rewards)] - np.nanmean(rewards))
    assert (found.is_kept.sum(), found.num_dropped, found.count) == (9, 1, 1.0)
    assert not make_advantages(np.full(4, 0.3), np.array([4]), "batch_mean").is_kept.any()
    assert make_advantages(np.zeros(4), np.array([2, 2]), "none").num_dropped == 2
    assert set(BASELINES) == set(get_args(Baseline))


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("grpo", {"ratio": "none", "clip_low": 0.2}, None),
        ("grpo", {"ratio": "none", "clip_low": 0.3}, "clip_low has no effect with ratio none"),
        ("cispo", {"clip_dual": 3.0}, "clip_dual has no effect with ratio clipped_weight"),
        ("grpo", {"longest": 9}, "longest has no effect with normalize_by answers"),
        ("gspo", {"clip_high": 0.0}, "clip_high: input should be greater than 0"),
        ("dr_grpo", {}, "set objective.longest"),
        ("dr_grpo", {"longest": 9}, None),
        ("rloo", {}, None),
    ],
)
def test_no_setting_is_ignored_or_guessed(kind, settings, said):
    if said is None:
        assert class_of_kind(kind).of(settings).for_run(RolloutConfig()).normalizer == "answers"
        return
    with pytest.raises((ValueError, UsageError), match=said):
        class_of_kind(kind).of(settings).for_run(RolloutConfig())


@pytest.mark.parametrize(
    ("objective", "lacks"),
    [
        ({"kind": "grpo", "kl": 0.1}, []),
        ({"kind": "dapo"}, ["policy_logprob", "answers", "reference_token_logprob"]),
        ({"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05}, ["policy_logprob", "answers"]),
    ],
    ids=["grpo", "dapo", "gspo"],
)
def test_verify_proves_it_of_a_store_with_what_it_needs(tiny, tmp_path, capsys, objective, lacks):
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    write_groups(tmp_path, model, tiny.model_dir, [3, 4, 2, 4], name="groups", lacks=lacks)
    values = {
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "model": {"name": str(tiny.model_dir), "precision": "fp32"},
        "data": {"name": "groups", "root": str(tmp_path)},
        "objective": objective,
        "batch": {"samples_per_step": 4, "epochs": 1},
        "eval": {"prompts": []},
    }
    (tmp_path / "run.json").write_text(json.dumps(values))
    assert main(["verify", str(tmp_path / "run.json"), "--ranks", "1"]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "run" / "verify.json").read_text())["rows"]}
    assert rows["packed"]["verdict"] == rows["each sample alone"]["verdict"] == "ok"
    if "reference_token_logprob" in lacks:
        # a run computes it before step 0
        assert main(["plan", str(tmp_path / "run.json"), "objective.kl=0.1"]) == 0
        assert "forward passes over" in " ".join(capsys.readouterr().out.split())
        assert main(["verify", str(tmp_path / "run.json"), "objective.kl=0.1", "--ranks", "1"]) == 0
