"""Every loss over answers is its form in plain torch, in fp64: loss, all gradients, metrics, however it is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from built_run import built_run
from plain_losses import KTO, POLICIES, SETTINGS, PlainStep
from transformers import AutoModelForCausalLM
from unit_store import write_groups, write_units

from flatout.config.objective import OBJECTIVES, REFERENCE, class_of_kind
from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.parallel.rank import Rank
from flatout.planner.steps.prefixes import make_bundles
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.planner.steps.training_plan import TrainingPlan
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.step import accumulate_gradients
from flatout.verifier.compare import LOGPROBS, Reference
from flatout.verifier.ranks import RankCase, run_rank_cases
from tests.usual import usual

NUM_UNITS, PER_STEP = 10, 5
LABELS = [1, 0, 1, 1, 0, 1, 0, 1, 0, 0]
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"share_prefix": "off"},
    "packed, shared": {"share_prefix": "on"},
    "rows": {"layout": "rows"},
}


@pytest.fixture(scope="module")
def root(tiny, tmp_path_factory):
    """The root of a data set of pairs, of one of labelled answers, and of one of sampled answers with advantages."""
    folder = tmp_path_factory.mktemp("answers")
    write_units(folder, tiny.model_dir, [2] * NUM_UNITS, name="pairs")
    write_units(folder, tiny.model_dir, [1] * NUM_UNITS, name="labelled", labels=LABELS)
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float64)
    write_groups(folder, model, tiny.model_dir, [3, 2, 4, 1, 2] * 2, name="groups")
    return folder


def data_of(name: str) -> str:
    return "labelled" if name in KTO else "groups" if name in POLICIES else "pairs"


def config_of(tiny: Any, root: Path, folder: Path, name: str, **batch: Any) -> Config:
    return make_config(
        {
            "run_dir": str(folder),
            "device": "cpu",
            "method": "full",
            "model": {"name": str(tiny.model_dir), "precision": "fp64"},
            "data": {"name": data_of(name), "root": str(root)},
            "objective": SETTINGS[name],
            "eval": {"prompts": []},
            "batch": {"samples_per_step": PER_STEP, "max_steps": 2, "micro_batch_tokens": 4000, **batch},
        }
    )


def with_reference(planned: PlannedRun) -> PlannedRun:
    """The plan with values for a reference, so that none is computed and no ratio is 0."""
    rng = np.random.default_rng(1)
    if REFERENCE in planned.objective.columns:
        # log-ratios of about 10 and of both signs; KTO's mean over answers to other prompts is negative in one form
        means = (6.6, 5.8 if planned.objective.model_dump().get("desirable_weight") == 1.5 else 6.6)
        for store, mean in zip([one.store for one in planned.data_sets], means, strict=False):
            store.extra[REFERENCE][:] = -mean * store.num_label_tokens + rng.normal(0.0, 8.0, store.num_samples)
    return planned


@pytest.fixture(scope="module")
def plain_step(tiny):
    kept: dict[str, PlainStep] = {}

    def find(planned: PlannedRun) -> PlainStep:
        other = planned.kl_pairs.store if planned.kl_pairs else None
        reference = planned.store.extra.get(REFERENCE, np.zeros(planned.store.num_samples))
        more = () if other is None else (other.answer_of, other.extra[REFERENCE])
        name = planned.store.meta.name + ("" if REFERENCE in planned.store.extra else ", no reference")
        name += "" if other is None else str(other.extra[REFERENCE][0])
        if name not in kept:
            kept[name] = PlainStep(tiny.model_dir, planned.store, planned.plan.step(0).sample_ids, reference, *more)
        return kept[name]

    return find


def cut(plan: TrainingPlan, step: StepPlan, wanted: int) -> tuple[MicroBatch, ...]:
    """The step in as many micro-batches of whole units, of unequal sizes."""
    # also of losses whose passes may part units
    samples = replace(plan.samples.take(plan.samples.indices_of(step.sample_ids)), parts_units=False)
    items = samples.items(plan.batch_layout.cost)
    units = [[items[index] for index in bundle.members] for bundle in make_bundles(items)]
    bounds = [0, *(PER_STEP - wanted + one for one in range(1, wanted + 1))]
    parts = [[item for unit in units[first:last] for item in unit] for first, last in pairwise(bounds)]
    layout = plan.batch_layout
    return tuple(layout.micro_batch(part) if layout.is_padded else layout.micro_batches(part)[0] for part in parts)


def test_every_loss_over_answers_has_a_form():
    """Models that score answers have a test of their own, as transformers has such models."""
    classes = {kind: class_of_kind(kind) for kind in OBJECTIVES}
    wanted = {kind for kind, own in classes.items() if own.scope != "token" and own.reads != "scores"}
    assert {settings["kind"] for settings in SETTINGS.values()} == wanted


@pytest.mark.parametrize("layout", usual(LAYOUTS, ["packed, shared"]))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_that_of_plain_torch_however_it_is_cut(tiny, root, tmp_path, plain_step, name, layout):
    config = config_of(tiny, root, tmp_path / "run", name, **LAYOUTS[layout])
    planned = with_reference(open_and_plan(config, Reporter(), Rank()))
    run = built_run(config, planned)
    step = run.plan.step(0)
    loss, gradients, metrics = plain_step(planned).gradients(name)
    assert metrics.get("kl", 1.0) > 0 or name == "kto, weighted"
    for wanted in (1, 2, 5):
        passes = cut(run.plan, step, wanted)
        assert len(passes) == wanted
        assert any(one.shared for one in passes) == (layout == "packed, shared" and name not in KTO)
        run.optimizer.zero_grad()
        sums = accumulate_gradients(run, replace(step, by_rank=(passes,))).tolist()
        got = planned.normalizers.means(sums, step)
        assert got[0] == pytest.approx(loss, rel=1e-7, abs=1e-8)
        assert name in POLICIES or got[0] == sums[0] / PER_STEP
        assert got[1] == pytest.approx(metrics, rel=1e-6, abs=1e-6)
        largest = max(float(one.norm()) for one in gradients.values())
        for parameter_name, parameter in run.named_parameters.items():
            # rotary cosines are computed in fp32
            assert parameter.grad is not None
            assert float((parameter.grad - gradients[parameter_name]).norm()) < 1e-6 * largest, parameter_name
    run.close()


# some losses on two processes, each layout; the product, also on three, with -m exhaustive
SOME = [
    (2, "packed", "ddp", "kto"),
    (2, "rows", "ddp", "kto, weighted"),
    (2, "packed, shared", "ddp", "dpo, robust"),
    (2, "rows", "ddp", "orpo"),
    (2, "packed, shared", "ddp", "grpo, kl"),
    (2, "rows", "ddp", "dapo"),
]
ALL = [
    (world, layout, strategy, name)
    for name in SETTINGS for world in (2, 3) for layout in LAYOUTS for strategy in ("ddp", "zero3")
]  # fmt: skip


@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_ranks_take_that_step_too(tiny, root, tmp_path, plain_step, cases):
    """One start of the processes for all losses, which read the reference's values from each run's folder."""
    jobs = []
    for place, (world, layout, strategy, name) in enumerate(cases):
        tokens = 500 if name in POLICIES else 300
        config = config_of(tiny, root, tmp_path / str(place), name, **{**LAYOUTS[layout], "micro_batch_tokens": tokens})
        planned = with_reference(open_and_plan(config, Reporter(), Rank()))
        loss, gradients, _ = plain_step(planned).gradients(name)
        config.folder.mkdir()
        if REFERENCE in planned.objective.columns:
            values = [store.extra[REFERENCE].tolist() for store in (one.store for one in planned.data_sets)]
            facts = {"ids": list(range(planned.store.num_samples)), "logprobs": values}
            (config.folder / LOGPROBS).write_text(json.dumps(facts))
        reference = Reference.write(config.folder / "reference", loss, gradients)
        values = config.model_dump(mode="json")
        values |= {"strategy": strategy, "data": config.data.model_dump(mode="json", exclude_unset=True)}
        jobs.append(RankCase(f"{name}, {layout}, {strategy}", world, values, 0, str(reference.folder), 1e-6))
    rows = run_rank_cases(jobs, tmp_path / "ranks")
    assert [row.num_ranks for row in rows] == [world for world, *_ in cases]
    assert {row.case: (row.largest, row.note) for row in rows if row.verdict != "ok"} == {}
