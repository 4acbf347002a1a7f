"""Out of memory in the middle of a run: the same steps in smaller pieces, and nothing of a failed pass left."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from unit_store import write_units

from flatout.checkpoint.write import Checkpoints
from flatout.config.read import make_config
from flatout.errors import ResourceError
from flatout.models.blocks import decoder_layers, hidden_states
from flatout.parallel.rank import Rank
from flatout.rollout.sampler import SamplingParams
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.answers import sampling
from flatout.trainer.build import build_run
from flatout.trainer.loop import run_steps
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.resume import restore, take_snapshot
from flatout.trainer.run import train
from flatout.trainer.state import Setup, TrainingRun
from flatout.trainer.step import accumulate_gradients, launch_step
from tests.usual import usual


class Events(Reporter):
    """Remembers events."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def event(self, kind: str, facts: Any) -> None:
        self.seen.append((kind, dict(facts)))

    def of(self, kind: str) -> list[Any]:
        return [facts for name, facts in self.seen if name == kind]


class SmallMemory(torch.autograd.Function):
    """Passes a tensor through; more than so many tokens do not fit, in the forward or the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, limit: int, where: str) -> torch.Tensor:
        ctx.too_large = states.shape[1] > limit
        if ctx.too_large and where == "forward":
            raise torch.OutOfMemoryError("planted in the forward pass")
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.too_large:
            raise torch.OutOfMemoryError("planted in the backward pass")
        return grad, None, None


def limit_memory(model: Any, tokens: int, where: str) -> None:
    """Passes of more tokens run out of memory in the first layer: in the backward pass, that is at its end."""

    def pass_through(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (SmallMemory.apply(args[0].requires_grad_(), tokens, where), *args[1:])

    decoder_layers(model)[0].register_forward_pre_hook(pass_through)


def make_run(config: Any, folder: Path) -> tuple[TrainingRun, Events]:
    events = Events()
    planned = open_and_plan(config, events, Rank())
    checkpoints = Checkpoints(folder, keep=1, on_event=events.event)
    return build_run(Setup(config, planned, checkpoints, events, Rank())), events


def config_of(
    tiny: Any, folder: Path, precision: str = "fp64", tokens: int = 1500, num_samples: int = 10, **sections: Any
) -> Any:
    values = {
        "model": {"name": str(tiny.model_dir), "precision": precision},
        "batch": {"samples_per_step": num_samples, "micro_batch_tokens": tokens, "max_steps": 6},
        **sections,
    }
    return tiny.config(folder, **values)


def finished(run: TrainingRun) -> list[torch.Tensor]:
    run_steps(run)
    return [parameter.detach().clone() for parameter in run.parameters]


PLACES = [("lora", "forward"), ("full", "backward"), ("lora", "backward"), ("full", "forward")]


@pytest.mark.parametrize(("method", "where"), usual(PLACES, PLACES[:2]))
def test_the_run_is_the_same_run(tiny, tmp_path, method, where):
    config = config_of(tiny, tmp_path / "run", method=method)
    calm, _ = make_run(config, tmp_path)
    expected = finished(calm)
    disturbed, events = make_run(config, tmp_path)
    limit_memory(disturbed.model, 700, where)
    got = finished(disturbed)
    told = events.of("out_of_memory")
    assert told
    assert all(fact["cap_tokens"] <= fact["tokens"] * 2 // 3 + 1 for fact in told)
    # remembered: the same size never fails twice
    assert [fact["tokens"] for fact in told] == sorted({fact["tokens"] for fact in told}, reverse=True)
    assert disturbed.progress.step == calm.progress.step == 6
    for one, other in zip(expected, got, strict=True):
        assert ((one - other).norm() / one.norm()).item() < 1e-10
    assert any(not torch.equal(one, other) for one, other in zip(expected, got, strict=True))


class Graphs:
    """Stands for recorded graphs: their third pass runs out of memory."""

    largest_tokens = 0

    def __init__(self, model: Any, where: str) -> None:
        self.model, self.where, self.num_passes = model, where, 0

    def __call__(self, batch: Any) -> torch.Tensor:
        self.num_passes += 1
        limit = batch.num_tokens - (self.num_passes == 3)
        states = hidden_states(self.model, batch)
        return SmallMemory.apply(states[None], limit, self.where)[0]


@pytest.fixture(scope="module")
def calm(tiny, tmp_path_factory):
    """The weights of a run of which nothing runs out of memory."""
    folder = tmp_path_factory.mktemp("calm")
    return finished(make_run(config_of(tiny, folder / "run"), folder)[0])


@pytest.mark.parametrize("where", usual(["forward", "backward"], ["backward"]))
def test_graphs_are_dropped_before_passes_get_smaller(tiny, calm, tmp_path, where):
    """Their memory is free then: the same passes fit, and the run stays the same to the bit."""
    disturbed, events = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    disturbed.loss_module.decoder = graphs = Graphs(disturbed.model, where)  # type: ignore[assignment]
    got = finished(disturbed)
    assert graphs.num_passes == 3
    assert disturbed.loss_module.decoder is None
    assert [fact["during"] for fact in events.of("graphs_dropped")] == ["training"]
    assert not events.of("out_of_memory")
    assert all(torch.equal(one, other) for one, other in zip(calm, got, strict=True))


def test_passes_get_smaller_once_slots_and_graphs_are_gone(tiny, calm, tmp_path):
    disturbed, events = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    disturbed.loss_module.decoder = Graphs(disturbed.model, "forward")  # type: ignore[assignment]
    with sampling(disturbed) as sampler:
        sampler.keeps_slots = True
        sampler.sample([[5, 6], [7]], 1, SamplingParams(2))
    limit_memory(disturbed.model, 700, "forward")
    got = finished(disturbed)
    kinds = [kind for kind, _ in events.seen if kind in ("slots_released", "graphs_dropped", "out_of_memory")]
    assert kinds[:3] == ["slots_released", "graphs_dropped", "out_of_memory"]
    assert kinds.count("slots_released") == kinds.count("graphs_dropped") == 1
    for one, other in zip(calm, got, strict=True):
        assert ((one - other).norm() / one.norm()).item() < 1e-10


@pytest.mark.parametrize("precision", usual(["fp32", "fp64"], ["fp32"]))
def test_equal_to_the_bit_with_a_run_that_had_the_cap_from_the_start(tiny, tmp_path, precision):
    """With dropout, whose random numbers belong to (step, rank, micro-batch)."""
    sections = {"lora": {"rank": 4, "dropout": 0.3}}
    disturbed, events = make_run(config_of(tiny, tmp_path / "a", precision, 3000, 20, **sections), tmp_path)
    (whole,) = disturbed.plan.step(0).by_rank[0]
    limit_memory(disturbed.model, whole.num_tokens - 1, "backward")
    got = finished(disturbed)
    cap = whole.num_tokens * 2 // 3
    assert [fact["cap_tokens"] for fact in events.of("out_of_memory")] == [cap]
    capped, _ = make_run(config_of(tiny, tmp_path / "b", precision, cap, 20, **sections), tmp_path)
    expected = finished(capped)
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_the_cap_outlives_a_restart(tiny, tmp_path):
    """Else a resumed run would cut its steps as planned again, and differ in the last bits."""
    config = config_of(tiny, tmp_path / "run", lora={"rank": 4, "dropout": 0.3})
    whole, _ = make_run(config, tmp_path / "whole")
    limit_memory(whole.model, 700, "backward")
    expected = finished(whole)
    first, events = make_run(config, tmp_path / "part")
    limit_memory(first.model, 700, "backward")
    for step in list(first.plan.steps())[:3]:
        launch_step(first, step)()
        first.progress.advance(step, updated=True, num_naive_tokens=0)
    first.checkpoints.save(take_snapshot(first))
    assert events.of("out_of_memory")
    second, events = make_run(config, tmp_path / "part")
    saved = second.checkpoints.newest()
    assert saved is not None
    restore(second, saved)
    got = finished(second)
    assert not events.of("out_of_memory")
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_only_the_gradients_of_the_pass_that_fits_remain(tiny, tmp_path):
    """The second micro-batch fails at the end of its backward pass: the first one's gradients must go as well."""
    run, events = make_run(config_of(tiny, tmp_path / "run", tokens=1200), tmp_path)
    step = run.plan.step(0)
    assert len(step.by_rank[0]) > 1
    calls = []

    def fail_once(grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planted")
        return grad

    expected = [parameter.detach().clone() for parameter in run.parameters]
    run.rank_meter.start_step(0.0)
    accumulate_gradients(run, step)
    calm = run.rank_meter.figures(0.0)
    assert calm["num_processed_tokens"] == step.num_tokens
    wanted = [parameter.grad.clone() for parameter in run.parameters]
    run.optimizer.zero_grad(set_to_none=True)
    run.rank_meter.start_step(0.0)
    handle = next(iter(run.named_parameters.values())).register_hook(fail_once)
    accumulate_gradients(run, step)
    handle.remove()
    assert len(events.of("out_of_memory")) == 1
    # passes that were repeated count once
    assert run.rank_meter.figures(0.0)["num_processed_tokens"] == step.num_tokens
    for one, parameter in zip(wanted, run.parameters, strict=True):
        assert torch.allclose(one, parameter.grad, rtol=1e-9, atol=1e-15)
    assert all(torch.equal(one, other) for one, other in zip(expected, run.parameters, strict=True))


def test_nothing_of_a_failed_forward_pass_stays(tiny, tmp_path, monkeypatch):
    """Memory runs out between the gate and up projections, whose fused product holds the graph of all layers."""
    run, events = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    mlp = decoder_layers(run.model)[-1].mlp
    alive: list[StorageWeakRef] = []

    def fail_once(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not alive:
            alive.append(StorageWeakRef(args[0].untyped_storage()))
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(run.watch, "event", lambda kind, facts: events.seen.append((kind, alive[0].expired())))
    handle = mlp.act_fn.register_forward_pre_hook(fail_once)
    accumulate_gradients(run, run.plan.step(0))
    handle.remove()
    assert events.seen[-1] == ("out_of_memory", True)


def test_what_cannot_be_split_stops_with_what_to_do(tiny, tmp_path):
    run, _ = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    limit_memory(run.model, 20, "forward")
    with pytest.raises(ResourceError, match=r"step 1: out of GPU memory .* cannot be split") as error:
        run_steps(run)
    assert error.value.fixes[0].settings == {"recompute": "offload"}
    assert error.value.exit_code == 6


def test_a_longer_sample_later_is_still_taken_whole(tiny, tmp_path):
    """A cap below a step's longest sample gives way to it."""
    run, _ = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    run.state.micro_batch_cap = 2
    step = run.plan.step(0)
    loss_sum, _ = accumulate_gradients(run, step)
    plain, _ = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    assert loss_sum.item() == pytest.approx(accumulate_gradients(plain, step)[0].item(), rel=1e-12)


def test_ranks_split_alone(tiny, tmp_path):
    """A rank that ran out of memory cuts only its own samples: the sum over ranks stays what it was."""
    run, _ = make_run(config_of(tiny, tmp_path / "run"), tmp_path)
    whole = run.plan.step(0)
    plan = replace(run.plan, batch_layout=replace(run.plan.batch_layout, num_ranks=2))
    run, step = replace(run, planned=replace(run.planned, plan=plan)), plan.step(0)
    totals = []
    for caps in ((None, None), (None, 300), (500, 400)):
        run.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rank, cap in enumerate(caps):
            run.state.micro_batch_cap = cap
            total += accumulate_gradients(replace(run, rank=Rank(rank, 2)), step)[0].item()
        totals.append(total)
    assert totals[1:] == pytest.approx([totals[0]] * 2, rel=1e-12)
    assert step.num_label_tokens == whole.num_label_tokens


class Phases(MemoryCallback):
    """Knows what the run does now."""

    now = ""

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self.now = self.now if name == "start" else name


def train_preferences(tiny: Any, root: Path, kind: str, phase: str, limit: int) -> Phases:
    """Train pairs, or for KTO labels; in a phase of the run, passes of more than `limit` tokens run out of memory."""
    labels = [1, 0] * 12 if kind == "kto" else None
    write_units(root, tiny.model_dir, [2] * 12 if kind == "dpo" else [1] * 24, name="d", labels=labels)
    config = make_config(
        {
            "run_dir": str(root / "run"),
            "device": "cpu",
            "model": {"name": str(tiny.model_dir), "precision": "fp64"},
            "data": {"name": "d", "root": str(root)},
            "objective": kind,
            "optim": {"lr": 1e-3},
            "lora": {"rank": 4},
            "batch": {"samples_per_step": 5 if kind == "dpo" else 10, "micro_batch_tokens": 700, "max_steps": 3},
            "eval": {"fraction": 0.4, "every_steps": 1, "prompts": []},
        }
    )
    seen = Phases()

    def limited(model: Any, batch: Any) -> torch.Tensor:
        if seen.now == phase and batch.num_tokens > limit:
            raise torch.OutOfMemoryError("planted")
        return hidden_states(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.models.model_with_loss.hidden_states", limited)
        train(config, callbacks=[seen])
    return seen


@pytest.mark.parametrize(
    ("kind", "phase", "during"),
    usual(
        [
            ("kto", "step", "estimates"),
            ("kto", "evaluating", "evaluation"),
            ("dpo", "computing the reference", "reference"),
            ("dpo", "evaluating", "evaluation"),
            ("cross_entropy", "evaluating", "evaluation"),
        ],
        [
            ("kto", "step", "estimates"),
            ("dpo", "computing the reference", "reference"),
            ("dpo", "evaluating", "evaluation"),
        ],
    ),
)
def test_passes_without_gradients_are_taken_again_too(tiny, tmp_path, metrics_of, kind, phase, during):
    """And what cannot be split ends the run with what to do."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert not [kind for kind, _ in train_preferences(tiny, whole, kind, "", 0).events if kind == "out_of_memory"]
    events = train_preferences(tiny, cut, kind, phase, 300).events
    told = [facts for name, facts in events if name == "out_of_memory"]
    assert {fact["during"] for fact in told} == {during}
    assert all(fact["cap_tokens"] < fact["tokens"] for fact in told)
    for which, loss in (("step", "loss"), ("eval", "eval_loss")):
        one, other = (metrics_of(root / "run", which) for root in (whole, cut))
        assert len(one) == len(other) >= 3
        assert bool(one[0].get("worst")) == (which == "eval")
        for before, after in zip(one, other, strict=True):
            assert after[loss] == pytest.approx(before[loss], rel=1e-10)
            assert after["metrics"] == pytest.approx(before["metrics"], rel=1e-9, abs=1e-12)
            # the losses of single samples are not counted twice
            worst = ([one["loss"] for one in record.get("worst", ())] for record in (before, after))
            assert next(worst) == pytest.approx(next(worst), abs=2e-6)
    with pytest.raises(ResourceError, match=f"step ., {during}: out of GPU memory .* lower data.max_tokens"):
        train_preferences(tiny, tmp_path / "none", kind, phase, 5)
