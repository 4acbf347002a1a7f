"""`flatout verify`: compute one step in every layout and strategy, and compare it with plain transformers."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from flatout.config.folders import run_identity
from flatout.config.objective import ObjectiveConfig
from flatout.config.parallel import STRATEGIES
from flatout.config.schema import Config, LoraConfig
from flatout.errors import NumericError, ResourceError, UsageError, counted
from flatout.io.durable_io import DurableIO
from flatout.io.stop_signals import SIGNAL_EXIT_CODE, StopSignals
from flatout.models.arch_quirks import whole_document_problem
from flatout.models.load.model import resolve_precision
from flatout.objectives.load import load_objective
from flatout.parallel.process_group import choose_device
from flatout.parallel.rank import Rank
from flatout.planner.steps.prefixes import make_bundles
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.model_shape import read_text_config
from flatout.trainer.passes import free_memory
from flatout.trainer.planned_run import PlannedRun
from flatout.trainer.state import TrainingRun
from flatout.trainer.trainable import check_start
from flatout.verifier.compare import Comparison, Reference, measure, plan_quietly, set_up_quietly
from flatout.verifier.own_rows import adapter_rows, reference_rows, with_plain_reference
from flatout.verifier.plain_loop import (
    PlainModel,
    change_last_bits,
    objective_step,
    plain_model,
    plain_step,
    wide_dtype,
)
from flatout.verifier.ranks import RankCase, run_rank_cases

Exact = Literal["fp32", "fp64"]
# rotary cosines are fp32 even in fp64 models, and their last bit depends on how many are computed at once
LIMITS: Mapping[Exact, float] = {"fp32": 1e-4, "fp64": 1e-5}
# if rounding alone moves plain transformers far, the limit of exact rows is a multiple of that, but at most this
TIMES_ROUNDING, LARGEST_LIMIT = 10.0, 0.01
ROUNDING = "plain, weights' last bits changed"
# limit in the run's own precision: a multiple of plain transformers' error in that precision, but at least this
TIMES_PLAIN, LEAST_LIMIT = 3.0, 0.02
# float8 products have no plain counterpart; docs/measurements.md requires a cosine over 0.98
FP8_LIMIT = 0.2
# on the CPU a micro-batch may hold the whole step up to this many tokens, so that it can be split in several ways
CPU_TOKENS = 8192
MAX_MICRO_BATCHES = 4


def require_equal(rows: Sequence[Comparison]) -> None:
    """Raise NumericError with the number of failed rows and the worst of them, if there are any."""
    failed = [row for row in rows if row.verdict == "FAIL"]
    if not failed:
        return
    worst = max(failed, key=lambda row: row.largest)
    where = f" in {worst.worst_parameter}" if worst.worst_parameter else ""
    why = worst.note or f"differs by {worst.largest:.1e} (limit {worst.limit:.0e}){where}"
    raise NumericError(
        f"verify: {len(failed)} of {len(rows)} ways to compute this step do not match the reference, such as "
        f"{worst.case} on {counted(worst.num_ranks, 'rank')}: {why}; do not train with them"
    )


def verify(
    config: Config,
    *,
    num_ranks: int,
    exact: Exact = "fp32",
    tolerance: float | None = None,
    on_row: Callable[[Comparison], None] = lambda row: None,
) -> tuple[list[Comparison], list[str]]:
    """Verify every way of computing the first step that has labels, and write verify.json to the run folder.

    Returns the rows of the table, and notes on what was changed to make the comparison exact. `tolerance` replaces the
    limit of the exact rows. `on_row` gets each row when it is ready. Raises ResourceError for more ranks than GPUs, and
    what loading the model or the data raises. A row above its limit raises nothing here.
    """
    if config.rollout.rounds is not None:
        raise UsageError(
            "rollout.rounds: a run of rounds has no step to verify before it samples; verify its loss on a data set of "
            "format: rollouts, or take a step of the finished run again: flatout replay RUN --step N"
        )
    device = choose_device(config.wanted_device, Rank())
    if device.type == "cuda" and num_ranks > (num_gpus := torch.cuda.device_count()):
        raise ResourceError(f"--ranks is {num_ranks}, but there is {counted(num_gpus, 'visible GPU')}; use fewer")
    # the rows below change settings, such as lora.dropout
    check_start(config, load_objective(config.objective), on_cpu=device.type == "cpu", reads_peft=True)
    run_identity(config.folder)
    rows: list[Comparison] = []
    # an exception, so that a signal leaves neither processes nor the folder behind
    signals = StopSignals(lambda: None, on_first=lambda: sys.exit(SIGNAL_EXIT_CODE + (signals.number or 0)))
    with signals, tempfile.TemporaryDirectory(prefix=".verify-", dir=config.folder) as work:
        for row in _rows(config, exact, Path(work).absolute(), tolerance, device, num_ranks):
            rows.append(row)
            on_row(row)
    notes, passed = _notes(config, exact, device), all(row.verdict != "FAIL" for row in rows)
    content = {"rows": [row.to_json() for row in rows], "notes": notes, "passed": passed}
    DurableIO().write_json(config.folder / "verify.json", content)
    return rows, notes


def exact_config(config: Config, exact: Exact, folder: Path) -> Config:
    """Return the same run in wide arithmetic without dropout, so that only bugs and the last bits can differ."""
    base = config.base.model_copy(update={"backward": "same"})
    if base.storage != "model":
        # products with fp8 storage are float8 in any precision; 4-bit weights can be dequantized for wide products
        dense = {"storage": "model", "compute": "auto"}
        base = base.model_copy(update=dense if base.storage == "fp8" else {"compute": "model"})
    return config.model_copy(
        update={
            "run_dir": folder,
            "model": config.model.model_copy(update={"precision": exact}),
            "lora": config.lora.model_copy(update={"dropout": 0.0}),
            "base": base,
            "full": config.full.model_copy(update={"weights": "fp32", "compute": "model", "update": "step"}),
            # each row on several ranks sets its own
            "strategy": "auto",
            "sharding": config.sharding.model_copy(update={"replicas": None, "offload": False}),
            "comm": config.comm.model_copy(update={"compress": "none"}),
        }
    )


def _notes(config: Config, exact: Exact, device: torch.device) -> list[str]:
    is_lora = config.method == "lora"
    notes = {
        f"reference: transformers' forward pass, one sample at a time, in {exact} on {device.type}": True,
        "PEFT computes LoRA; B of a new adapter is moved away from zero, or A would have no gradient": is_lora,
        "lora.dropout is 0 here: with dropout, a step has no single correct result": is_lora and config.lora.dropout,
        f"comm.compress is none here: sums in {config.comm.compress} are rounded": config.comm.compress != "none",
        "model.neftune_alpha is 0 here: the reference has no noise on embeddings": config.model.neftune_alpha,
        "experts.balance_loss and experts.z_loss are 0 here: the reference has cross-entropy only": (
            config.experts.balance_loss or config.experts.z_loss
        ),
        "experts.parallel is 1 here: it does not change the sums": config.experts.parallel > 1,
        "context.parallel is 1 here, except in the row that names it: it does not change the sums": (
            config.context.parallel > 1
        ),
        "sharding.offload is false here: it does not change the sums": config.sharding.offload,
        f"float8 matmuls are not exact: rows in {exact} use the weights as stored in the files": (
            is_lora and config.base.storage == "fp8"
        ),
        f"float8 matmuls are not exact: rows in {exact} take base.backward: same": config.base.backward == "fp8",
    }
    return [note for note, applies in notes.items() if applies]


def _rows(
    real: Config, exact: Exact, folder: Path, tolerance: float | None, device: torch.device, num_ranks: int
) -> Iterator[Comparison]:
    """Yield the rows of one process, those in the run's own precision, and those of several processes."""
    limit = LIMITS[exact] if tolerance is None else tolerance
    # plain transformers would normalize the routers' losses by micro-batch
    experts = real.experts.model_copy(update={"balance_loss": 0.0, "z_loss": 0.0, "parallel": 1})
    others = {"context": {"parallel": 1}, "model": {"neftune_alpha": 0.0}}
    same = {name: getattr(real, name).model_copy(update=values) for name, values in others.items()}
    real = real.model_copy(update={"experts": experts, **same})
    config = exact_config(real, exact, folder)
    planned = plan_quietly(config, Rank())
    step = next((step for step in planned.plan.steps() if step.num_label_tokens), None)
    if step is None:
        raise UsageError("verify: no step of this run has label tokens; check the data")
    tokens = planned.plan.batch_layout.micro_batch_tokens
    if device.type == "cpu":
        tokens = max(tokens, min(step.num_tokens, CPU_TOKENS))
    batch = config.batch.model_copy(update={"micro_batch_tokens": max(_largest_unit(planned), tokens)})
    config = config.model_copy(update={"batch": batch})
    planned = plan_quietly(config, Rank())
    step = planned.plan.step(step.index)
    adapter = folder / "adapter"
    plain = plain_model(config, device, adapter, planned.scoring)
    planned = with_plain_reference(plain, config, planned, step)
    loss = _plain_loss(plain, config, planned, step)
    reference = Reference.write(folder / "reference", loss, plain.gradients)
    *padded, rounding = _plain_rows(plain, config, planned, step, reference)
    if tolerance is None and rounding.limit > limit:
        limit = rounding.limit
        yield rounding
    yield from (row.judged(limit) for row in padded)
    del plain
    free_memory(device)
    if config.method == "lora":
        # the adapter begins as the plain model's did, so nothing else may say how it begins
        begins = {"continue_from": adapter, "init": LoraConfig.model_fields["init"].default, "init_path": None}
        config = config.model_copy(update={"lora": config.lora.model_copy(update=begins)})
    try:
        with set_up_quietly(config, planned, Rank(), folder) as run:
            for row in _cut_rows(run, step, reference):
                yield row.judged(limit)
    except (UsageError, NumericError) as error:
        yield Comparison(planned.plan.batch_layout.name, limit=limit, note=error.text)
        return
    precision = resolve_precision(real.model.precision, device)
    if precision != resolve_precision(config.model.precision, device):
        yield from _own_rows(real, config, device, reference, step.index)
    yield from reference_rows(real.model_copy(update={"run_dir": config.run_dir}), step.index)
    if cases := _rank_cases(config, reference, limit, planned, step, num_ranks):
        yield from run_rank_cases(cases, folder / "ranks")


def _plain_loss(
    plain: PlainModel, config: Config, planned: PlannedRun, step: StepPlan, *, max_tokens: int | None = None
) -> float:
    """Return a step's loss by plain transformers and accumulate its gradient.

    Without `max_tokens`, samples run alone and an objective computes in fp64; with it, as in `plain_step` and in fp32.
    """
    if config.objective == ObjectiveConfig():
        return plain_step(plain, plain.read(planned.store, step.sample_ids), max_tokens=max_tokens or 0)
    kl_store = planned.kl_pairs and planned.kl_pairs.store
    dtype = torch.float64 if max_tokens is None else wide_dtype(plain)
    return objective_step(plain, planned.objective, planned.store, step.sample_ids, kl_store, dtype=dtype)


def _plain_row(
    plain: PlainModel, config: Config, planned: PlannedRun, step: StepPlan, reference: Reference, case: str
) -> Comparison:
    loss = _plain_loss(plain, config, planned, step, max_tokens=planned.plan.batch_layout.micro_batch_tokens)
    norm = float(torch.stack([gradient.double().norm() for gradient in plain.gradients.values()]).norm())
    return reference.compare(case, loss, norm, plain.gradients.items())


def _plain_rows(
    plain: PlainModel, config: Config, planned: PlannedRun, step: StepPlan, reference: Reference
) -> list[Comparison]:
    """Return plain transformers' padded batches, and how far it moves with other last bits in its weights.

    The second has the limit that follows; the weights stay changed. A loss over answers, whose batches are not padded,
    is a few numbers, of which one draw may hardly move, so it takes two.
    """
    is_padded = config.objective == ObjectiveConfig()
    padded = [_plain_row(plain, config, planned, step, reference, "padded, plain transformers")] if is_padded else []
    draws = []
    for draw in range(1 if is_padded else 2):
        change_last_bits(plain, config.seed + draw)
        draws.append(_plain_row(plain, config, planned, step, reference, ROUNDING))
    row = max(draws, key=lambda row: row.largest)
    limit = min(TIMES_ROUNDING * row.largest, LARGEST_LIMIT)
    note = f"rounding alone changes this step by {row.largest:.0e}, so the limit is {limit:.0e}"
    more = "; --fp64 compares it more exactly" if limit == LARGEST_LIMIT else ""
    return [*padded, replace(row, limit=limit, verdict="noise", note=note + more)]


def _cut_rows(run: TrainingRun, step: StepPlan, reference: Reference) -> Iterator[Comparison]:
    """Yield rows for the step packed into as few micro-batches as possible, then into more, then one per unit."""
    layout, samples = run.plan.batch_layout, run.plan.samples
    items = samples.take(samples.indices_of(step.sample_ids)).items(layout.cost)
    longest, kind = max(item.length for item in items), "sample" if items[0].unit is None else "unit"
    by_unit = tuple(layout.micro_batch([items[index] for index in bundle.members]) for bundle in make_bundles(items))
    largest = run.plan.largest_unit(by_unit)
    cuts: dict[int, tuple[MicroBatch, ...]] = {}
    for num_batches in range(1, MAX_MICRO_BATCHES + 1):
        # with some slack, or samples of uneven lengths would need one more micro-batch
        tokens = max(largest, -(-step.num_tokens // num_batches) + longest // 8)
        batches = run.plan.resplit(step, 0, min(run.plan.batch_layout.micro_batch_tokens, tokens))
        cuts.setdefault(len(batches), batches)
    if run.planned.objective.scope != "unit":
        cuts[len(by_unit)] = by_unit
    for num, batches in sorted(cuts.items()):
        several = f"{layout.name}, {num} micro-batches"
        case = layout.name if num == 1 else f"each {kind} alone" if num == len(by_unit) else several
        yield measure(run, replace(step, by_rank=(batches,)), reference, case)


def _largest_unit(planned: PlannedRun) -> int:
    """Return the tokens of the largest unit, or sample of units that may be parted, if samples share nothing."""
    is_padded = planned.plan.batch_layout.is_padded
    return int(planned.plan.samples.part_tokens(is_padded=is_padded, with_padding=False).max())


def _own_rows(
    real: Config, trained: Config, device: torch.device, reference: Reference, step_index: int
) -> Iterator[Comparison]:
    """Yield rows in the run's own precision: the error of plain transformers, and the run with a limit based on it."""
    config = real.model_copy(
        update={
            "run_dir": trained.run_dir,
            "lora": trained.lora,
            "full": real.full.model_copy(update={"update": "step"}),
            "strategy": trained.strategy,
            "sharding": trained.sharding,
        }
    )
    name = str(resolve_precision(config.model.precision, device)).removeprefix("torch.")
    planned = plan_quietly(config, Rank())
    step = planned.plan.step(step_index)
    based, adapter = config.model_copy(update={"base": trained.base}), config.lora.continue_from or Path()
    plain = plain_model(based, device, adapter, planned.scoring)
    noise = _plain_row(plain, config, planned, step, reference, f"plain transformers in {name}")
    del plain
    free_memory(device)
    shows_little = f"in {name}, rounding is as large as this step's gradient, so the next row shows little"
    yield replace(noise, verdict="noise", note=shows_little if TIMES_PLAIN * noise.largest >= 1 else "")
    least = LIMITS["fp32"] if name in ("float32", "float64") else LEAST_LIMIT
    limit = max(TIMES_PLAIN * noise.largest, FP8_LIMIT if config.computes_in_fp8 else least)
    with set_up_quietly(config, planned, Rank(), trained.folder) as run:
        yield measure(run, step, reference, f"{run.plan.batch_layout.name} in {name}, as in the run").judged(limit)
        if config.method == "lora":
            yield from adapter_rows(run, step, has_adapter=real.lora.continue_from is not None)


def _rank_cases(
    config: Config, reference: Reference, limit: float, planned: PlannedRun, step: StepPlan, num_ranks: int
) -> list[RankCase]:
    """Return a case for every strategy, with two micro-batches per rank where possible.

    Strategies that keep whole state run on every number of ranks, the others on `num_ranks`. An engine of its own
    shards by its own file, so it has no case. Pairs of ranks share micro-batches in one more, if the model allows it.
    """
    cases = []
    longest, budget = _largest_unit(planned), planned.plan.batch_layout.micro_batch_tokens

    def add(name: str, strategy: str, world: int, context_ranks: int = 1) -> None:
        values = config.model_dump(mode="json")
        # a default is no demand on a data set that was built with another value
        values["data"] = config.data.model_dump(mode="json", exclude_unset=True)
        values["strategy"] = strategy
        if context_ranks > 1:
            values["context"]["parallel"] = context_ranks
            # the ranks are given, and need not be those of the run; prefixes are proved in the other rows
            values["gpus"], values["batch"]["share_prefix"] = None, "off"
        num_micro_batches = 2 * world // context_ranks
        values["batch"]["micro_batch_tokens"] = max(longest, min(budget, -(-step.num_tokens // num_micro_batches)))
        values["sharding"]["replicas"] = 2 if STRATEGIES[strategy].has_replicas else None
        cases.append(RankCase(name, world, values, step.index, str(reference.folder), limit))

    for name, traits in STRATEGIES.items():
        if name == "single" or traits.package:
            continue
        least = 4 if traits.has_replicas else 2
        for world in range(max(least, num_ranks) if traits.shards_state else least, num_ranks + 1):
            add(name, name, world)
    has_form = config.model.attention in ("auto", "varlen", "sdpa", "plain")
    is_packed = planned.plan.batch_layout.name == "packed"
    problem = whole_document_problem(read_text_config(config.model.name, config.model.revision))
    if num_ranks > 1 and has_form and is_packed and problem is None:
        add("ddp, context.parallel 2", "ddp", num_ranks // 2 * 2, context_ranks=2)
    return cases
