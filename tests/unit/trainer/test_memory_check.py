"""Measured passes correct the memory plan: once, the same on every start, and never that of a resumed run."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from flatout.checkpoint.write import Checkpoints
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.config.schema import Config
from flatout.errors import CheckpointError, ResourceError
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.rank import Rank
from flatout.planner.devices import GIB, Device
from flatout.planner.memory.sizes import Correction, MeasuredPass, fit_correction
from flatout.planner.settings import PlanSettings
from flatout.planner.steps.step_plan import StepPlan
from flatout.track.callback import MemoryCallback, Reporter
from flatout.trainer.build import build_run
from flatout.trainer.memory_check import MemoryCheck, choose_passes, read_record, reason_not_to_measure
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.state import Setup, TrainingRun
from tests.usual import usual

# a GPU that holds about a third of a step of the tiny model in one pass
GPU = Device("a GPU", int(0.1 * GIB))
MIB = 1 << 20
# a GPU that holds a step without recomputation, unless passes take much more than planned
LARGER_GIB = 0.2


class Told(MemoryCallback):
    """Remembers the lines of start-up by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def on_stage(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def of(self, stage: str) -> list[str]:
        return [text for name, text in self.lines if name == stage]


@pytest.fixture
def config(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("FLATOUT_CHECK_AGAIN")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    shutil.copytree(tiny.model_dir, model)
    made: Config = tiny.config(
        tmp_path / "run",
        model={"name": str(model)},
        batch={"samples_per_step": 120, "max_steps": 2, "micro_batch_tokens": None},
        device="cpu",
        recompute="none",
    )
    made.folder.mkdir(parents=True, exist_ok=True)
    return made


class Start:
    """One start of a run that is planned for `GPU`, whose passes take `factor` times their fitted bytes and more."""

    def __init__(
        self,
        config: Config,
        *,
        factor: float = 1.0,
        more_bytes: int = 0,
        reuse_measured: bool = False,
        gpu: Device = GPU,
        measure: Callable[[TrainingRun, Sequence[StepPlan], int], list[int]] | None = None,
    ) -> None:
        self.told, self.num_measured, self.factor, self.more_bytes = Told(), 0, factor, more_bytes
        reporter, rank = Reporter(self.told), Rank()
        group = ControlGroup(rank)
        check = MemoryCheck(config, group, reporter, reuse_measured=reuse_measured, measure=measure or self.measure)
        planned = open_and_plan(config, reporter, rank, check.corrected(gpu))
        self.first_plan = planned
        checkpoints = Checkpoints(config.folder, keep=1, on_event=lambda kind, facts: None)
        run = build_run(Setup(config, planned, checkpoints, reporter, rank), memory_check=check)
        self.planned: PlannedRun = run.planned
        assert run.plan.batch_layout == run.planned.plan.batch_layout
        run.close()

    def measure(self, run: TrainingRun, steps: Sequence[StepPlan], bytes_before_model: int) -> list[int]:
        self.num_measured += 1
        model, found = run.memory.model, []
        assert model is not None
        for step in steps:
            fitted = model.fitted_estimate(step.by_rank[0][0].size, run.memory.recompute, True)
            taken = fitted.activations_bytes + fitted.working_bytes
            state = fitted.state_bytes - fitted.optimizer_bytes
            found.append(int(state + self.factor * taken + self.more_bytes))
        return found

    @property
    def tokens(self) -> int:
        return self.planned.memory.micro_batch_tokens


def passes(scale: float, offset_bytes: int, *planned: int, state_bytes: int = 1000 * MIB) -> list[MeasuredPass]:
    return [
        MeasuredPass(own // MIB, state_bytes + own, own, int(state_bytes + scale * own + offset_bytes))
        for own in planned
    ]


@pytest.mark.parametrize("offset_bytes", [0, 300 * MIB, -90 * MIB])
@pytest.mark.parametrize("scale", [0.8, 1.0, 1.13, 1.6])
def test_the_line_through_two_passes_predicts_the_largest(scale, offset_bytes):
    found = passes(scale, offset_bytes, 1000 * MIB, 1300 * MIB, 2000 * MIB)
    most = 4000 * MIB
    correction = fit_correction(found, most_bytes=most + 1000 * MIB, most_pass_bytes=most)
    off = (scale - 1) * most + offset_bytes
    if abs(off) <= 0.05 * (most + 1000 * MIB):
        assert correction == Correction()
    else:
        assert isinstance(correction, Correction)
        activations, working = correction.of(most - 500 * MIB, 500 * MIB)
        assert activations + working == pytest.approx(scale * most + offset_bytes, rel=1e-3)


def test_passes_that_do_not_agree_or_have_one_size_correct_nothing():
    most = {"most_bytes": 3000 * MIB, "most_pass_bytes": 2000 * MIB}
    same = passes(1.3, 0, 1000 * MIB, 1000 * MIB)
    assert fit_correction(same, **most) == "passes of two lengths cannot be told apart"
    small, middle, large = passes(1.3, 0, 400 * MIB, 700 * MIB, 1000 * MIB)
    assert fit_correction([small, middle, large], **most) == Correction(1.3, 0)
    for off in (-1, 1):
        near = replace(middle, measured_bytes=middle.measured_bytes + off * 80 * MIB)
        assert isinstance(fit_correction([small, near, large], **most), Correction)
        far = replace(middle, measured_bytes=middle.measured_bytes + off * 120 * MIB)
        assert fit_correction([small, far, large], **most) == "passes of different lengths do not agree"
    # 40 MiB appear between two passes that differ by little
    small, large = passes(1.0, 0, 10 * MIB, 20 * MIB, state_bytes=100 * MIB)
    large = replace(large, measured_bytes=large.measured_bytes + 40 * MIB)
    found = fit_correction([small, large], most_bytes=140 * MIB, most_pass_bytes=40 * MIB)
    assert found == "the difference is too large for any GPU"
    # a pass never takes less than nothing
    assert Correction(0.5, -100 * MIB).of(MIB, MIB) == (MIB // 2, 0)


def test_what_is_measured_are_shares_of_the_largest_pass(config):
    planned = open_and_plan(config, Reporter(), Rank(), GPU)
    _, _, largest = planned.plan.largest_pass
    steps = choose_passes(planned)
    shares = [step.by_rank[0][0].num_padded_tokens / largest.num_padded_tokens for step in steps]
    assert [share <= bound for share, bound in zip(shares, (0.25, 0.25, 0.4, 0.5), strict=True)] == [True] * 4
    assert shares[0] == shares[1] < shares[2] < shares[3]
    assert shares[3] > 0.4
    on_two = open_and_plan(config, Reporter(), Rank(0, 2), GPU)
    assert all(len(step.by_rank) == 2 and step.by_rank[0] == step.by_rank[1] for step in choose_passes(on_two))


def test_a_gpu_that_takes_more_is_planned_again_before_step_0(config):
    held = Start(config)
    assert held.num_measured == 1
    assert held.planned.pass_settings == held.first_plan.pass_settings
    (line,) = [text for text in held.told.of("memory") if text.startswith("measured")]
    assert "planned again" not in line
    off = Start(config, factor=1.25)
    assert off.tokens < held.tokens
    assert off.num_measured == 1
    (line,) = [text for text in off.told.of("memory") if text.startswith("measured")]
    assert line.endswith("planned again with 25.0% more per token and 0.00 GiB more per pass")
    assert "measured passes take 25.0% more per token" in off.planned.memory.reason
    # what the corrected plan says of its largest pass is what that pass takes
    model, memory = off.planned.memory.model, off.planned.memory
    assert model is not None
    _, _, largest = off.planned.plan.largest_pass
    fitted = model.fitted_estimate(largest.size, memory.recompute, True)
    truth = fitted.state_bytes + 1.25 * (fitted.activations_bytes + fitted.working_bytes)
    estimate = memory.estimate(largest.size)
    assert estimate is not None
    assert estimate.total_bytes == pytest.approx(truth, rel=0.01)
    assert memory.budget_bytes is not None
    assert truth <= memory.budget_bytes * 1.01


def test_a_gpu_that_takes_less_holds_more_tokens(config):
    assert Start(config, factor=0.7).tokens > Start(config).tokens


@pytest.mark.parametrize("factor", usual([1.02, 1.25], [1.25]))
def test_an_equal_start_measures_nothing_and_plans_alike(config, factor):
    first = Start(config, factor=factor, reuse_measured=True)
    second = Start(config, factor=factor, reuse_measured=True)
    assert (first.num_measured, second.num_measured) == (1, 0)
    assert second.first_plan.pass_settings == first.planned.pass_settings == second.planned.pass_settings
    assert second.planned.device == first.planned.device
    assert second.planned.memory.reason == first.planned.memory.reason
    assert "not measured: these passes were measured on this GPU before" in second.told.of("memory")
    # other code in the process, or another setting: measured again
    assert Start(config, factor=factor).num_measured == 1
    other = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 8})})
    assert Start(other, factor=factor, reuse_measured=True).num_measured == 1


def test_each_recompute_level_is_measured_once(config):
    """Passes that take more lead to another level, whose passes are measured as well.

    No level is taken only because it was not measured: until then it is taken to need as much more as the others.
    """
    auto, gpu = config.model_copy(update={"recompute": "auto"}), Device("a GPU", int(LARGER_GIB * GIB))
    start = Start(auto, factor=1.6, reuse_measured=True, gpu=gpu)
    assert start.planned.device is not None
    levels = [kind.split()[0] for kind in start.planned.device.corrections]
    assert levels == ["none", "layers"]
    assert start.num_measured == 2
    assert start.planned.memory.recompute == 1
    assert "measured passes take 60.0% more per token" in start.planned.memory.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": {"micro_batch_tokens": 4096}}, "batch.micro_batch_tokens is set"),
        ({"deterministic": True}, "the plan of a deterministic run does not depend on measurements"),
    ],
)
def test_a_plan_that_measurements_may_not_change_is_not_measured(tiny, config, changes, why):
    values = config.model_dump()
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    Start(config, factor=1.25, reuse_measured=True)
    start = Start(Config.model_validate(values), factor=1.25, reuse_measured=True)
    assert start.num_measured == 0
    assert start.planned.device == GPU
    assert f"not measured: {why}" in start.told.of("memory")
    assert start.planned.pass_settings == start.first_plan.pass_settings


@pytest.mark.parametrize("planned", usual(["selective", "budget", "full", "none"], ["budget", "none"]))
def test_memory_is_measured_of_the_level_at_which_layers_recompute(config, planned):
    """No layer compiles on a CPU, so the compiler cannot recompute a part of one."""
    model = config.model.model_copy(update={"precision": "bf16"})
    config = config.model_copy(update={"recompute": planned, "compile": "auto", "model": model})
    start = Start(config, factor=1.25, reuse_measured=True)
    level = "full" if planned in ("selective", "budget") else planned
    assert start.planned.device is not None
    assert [kind.split()[0] for kind in start.planned.device.corrections] == [level]
    assert start.num_measured == 1


def test_a_plan_that_memory_does_not_limit_is_measured_too(config):
    """An estimate that is too low by half would otherwise keep itself from being checked."""
    start = Start(config, factor=1.5, gpu=Device("a large GPU", 80 * GIB))
    assert start.num_measured == 1
    assert any("planned again with 50.0% more per token" in text for text in start.told.of("memory"))
    assert start.planned.pass_settings == start.first_plan.pass_settings


def test_a_document_that_fills_a_micro_batch_is_not_run_before_the_first_step(config):
    alone = config.model_copy(update={"batch": config.batch.model_copy(update={"samples_per_step": 1})})
    planned = open_and_plan(alone, Reporter(), Rank(), GPU)
    _, _, largest = planned.plan.largest_pass
    need = planned.memory.estimate(largest.size)
    assert need is not None
    start = Start(alone, factor=1.25, gpu=Device("a GPU", int(1.3 * need.total_bytes)))
    assert start.num_measured == 0
    count = f"{largest.num_tokens:,}"
    why = f"not measured: samples are not split, and the longest has {count} tokens; the largest micro-batch {count}"
    assert why in start.told.of("memory")


def test_a_run_that_does_not_fit_as_measured_says_so(config):
    gpu = Device("a GPU", int(0.09 * GIB))
    Start(config, gpu=gpu)
    with pytest.raises(ResourceError, match="the longest sample has"):
        Start(config, factor=1.95, gpu=gpu)


def test_a_resumed_run_keeps_the_corrections_of_its_start(config):
    first = Start(config, factor=1.25, reuse_measured=True)
    assert read_record(config.folder / "memory.json") == first.planned.device
    # another start finds other facts
    other = config.model_copy(update={"run_dir": config.folder.parent / "other"})
    (config.folder / "checkpoints" / "step-1").mkdir(parents=True)

    def known(config: Config) -> Device:
        return MemoryCheck(config, ControlGroup(Rank()), Reporter(), reuse_measured=True).corrected(GPU)

    assert known(config) == first.planned.device
    told, other_gpu = Told(), Device("another GPU", 2 * GIB)
    check = MemoryCheck(config, ControlGroup(Rank()), Reporter(told), reuse_measured=True)
    assert check.corrected(other_gpu) == other_gpu
    assert told.of("memory") == ["memory.json was measured on a GPU and is not used on another GPU"]
    (config.folder / "memory.json").unlink()
    # from before there were records: the constants, though an equal start has kept a correction
    assert known(config) == GPU
    assert known(other) == first.planned.device
    (config.folder / "memory.json").write_text('{"name": "a GPU", "memory_bytes": "much"}')
    with pytest.raises(CheckpointError, match=r"memory\.json: memory_bytes"):
        known(config)


def test_corrections_do_not_reach_other_layouts_and_groups(config):
    model = Start(config).planned.memory.model
    assert model is not None
    kinds = {model.kind_of_pass("none"), model.kind_of_pass("full")}
    for changes in ({"context_ranks": 2}, {"expert_ranks": 2}, {"strategy": "zero3"}):
        changed = replace(model, parallel_layout=replace(model.parallel_layout, **changes))
        kinds.add(changed.kind_of_pass("none"))
    rows = config.model_copy(update={"batch": config.batch.model_copy(update={"layout": "rows"})})
    kinds.add(replace(model, settings=PlanSettings.of(rows)).kind_of_pass("none"))
    assert len(kinds) == 6


def test_passes_of_sharded_state_are_not_measured(config):
    planned = Start(config).planned
    for changes, why in (({"strategy": "zero3"}, "state is sharded"), ({"context_ranks": 2}, "several ranks share")):
        layout = replace(planned.parallel_layout, **changes)
        assert (reason_not_to_measure(config, replace(planned, parallel_layout=layout)) or "").startswith(why)


def test_plan_without_a_gpu_reproduces_a_runs_plan(config, tmp_path, capsys):
    start = Start(config, factor=1.25)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    record = str(config.folder / "memory.json")
    assert main(["plan", str(tmp_path / "run.yaml"), "--measured", record, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["micro_batch_tokens"] == start.tokens
    assert values["decision"] == start.planned.memory.reason
    # as in the run, a plan that is fixed takes no measurement
    assert main(["plan", str(tmp_path / "run.yaml"), "--measured", record, "--json", "deterministic=true"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batch_tokens"] > start.tokens
    assert main(["plan", str(tmp_path / "run.yaml"), "--measured", str(tmp_path / "none.json")]) == 2
    assert "none.json: the file is missing" in capsys.readouterr().err


def test_running_out_of_memory_while_measuring_changes_no_plan(config):
    def runs_out(run: TrainingRun, steps: Sequence[StepPlan], bytes_before_model: int) -> list[int]:
        run.state.micro_batch_cap = 512
        return [GIB] * len(steps)

    start = Start(config, measure=runs_out)
    assert "not measured: out of memory on rank 0; its micro-batches stay smaller" in start.told.of("memory")
    assert start.planned.pass_settings == start.first_plan.pass_settings


def test_passes_that_take_far_more_than_any_card_explains_leave_the_plan(config):
    start = Start(config, factor=3.0)
    (line,) = [text for text in start.told.of("memory") if text.startswith("measured")]
    assert line.endswith("; not used, because the difference is too large for any GPU")
    assert start.planned.device is not None
    assert not start.planned.device.corrections
