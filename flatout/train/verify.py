"""`flatout verify`: one step of the user's run, computed in every way that it may be cut, beside the plain truth."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray

from flatout.config.schema import Config
from flatout.errors import NumericError, ResourceError, UsageError
from flatout.models.load import resolve_precision
from flatout.parallel.connect import choose_device
from flatout.parallel.rank import Rank
from flatout.plan.types import MicroBatch, StepPlan
from flatout.train.planning import Planned, tokenizer_name
from flatout.train.state import Run
from flatout.train.storage import Storage
from flatout.train.verify_compare import Reference, Row
from flatout.train.verify_families import FAMILIES, write_family
from flatout.train.verify_measure import free_memory, measure, plan_quietly, set_up_quietly
from flatout.train.verify_plain import PlainModel, plain_model, plain_step
from flatout.train.verify_ranks import RankCase, run_rank_cases

Exact = Literal["fp32", "fp64"]
# rotary's cosines are fp32 in fp64 models too, and their last bit depends on how many are made at once
LIMITS: Mapping[Exact, float] = {"fp32": 1e-4, "fp64": 1e-5}
# in the run's own precision: so many times what plain transformers loses to the same precision, but no less than this
TIMES_PLAIN, LEAST_LIMIT = 3.0, 0.02
# float8 products have no plain counterpart: docs/numerics.md asks for a cosine over 0.98
FP8_LIMIT = 0.2
# a micro-batch on the CPU holds the whole step up to so many tokens, so that it can be cut in several ways
CPU_TOKENS = 8192
MAX_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class SpreadCase:
    """A strategy to verify: the fewest ranks it needs, settings under `sharding`, whether on every number of ranks."""

    strategy: str
    min_ranks: int = 2
    sharding: Mapping[str, Any] = field(default_factory=dict)
    every_number: bool = False


STRATEGIES = (
    SpreadCase("ddp", every_number=True),
    SpreadCase("zero1"),
    SpreadCase("zero2"),
    SpreadCase("zero3"),
    SpreadCase("fsdp"),
    SpreadCase("hsdp", min_ranks=4, sharding={"replicas": 2}),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was verified: `notes` say what was changed to make it exact, `rows` are the table."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "FAIL"]

    def require_equal(self) -> None:
        """Raise NumericError naming the failed rows and the worst of them."""
        if not self.failed:
            return
        worst = max(self.failed, key=lambda row: row.largest)
        where = f" in {worst.worst_parameter}" if worst.worst_parameter else ""
        why = worst.note or f"differs by {worst.largest:.1e} (limit {worst.limit:.0e}){where}"
        raise NumericError(
            f"verify: {len(self.failed)} of {len(self.rows)} ways of computing this step are not the plain one, such "
            f"as {worst.case} on {worst.num_ranks} rank(s): {why}; do not train with it"
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to verify: its exact configuration, its step and where its reference is. `label` tells families apart."""

    label: str
    config: Config
    folder: Path
    limit: float

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def reference(self) -> Path:
        return self.folder / "reference"

    def named(self, case: str) -> str:
        return f"{self.label}: {case}" if self.label else case


def verify(
    config: Config,
    *,
    num_ranks: int,
    exact: Exact = "fp32",
    tolerance: float | None = None,
    families: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Every way of computing the first step that has labels; writes verify.json into the run folder.

    `tolerance` replaces the limit of the exact rows. Rows go to `on_row` as they come. Raises ResourceError for more
    ranks than GPUs, and what loading the model or the data raises; a row above its limit raises nothing here.
    """
    device = choose_device(config.wanted_device, Rank())
    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise ResourceError(f"--ranks is {num_ranks}, {torch.cuda.device_count()} GPU(s) visible; ask for fewer")
    limit = LIMITS[exact] if tolerance is None else tolerance
    Storage().make_dir(config.folder)
    rows: list[Row] = []
    rank_cases: list[RankCase] = []

    def tell(row: Row) -> None:
        rows.append(row)
        on_row(row)

    with tempfile.TemporaryDirectory(prefix=".verify-", dir=config.folder) as work:
        folder = Path(work).absolute()
        subjects = [Subject("", exact_config(config, exact, folder), folder / "run", limit)]
        if families:
            subjects += _family_subjects(subjects[0], folder)
        for subject in subjects:
            subject.folder.mkdir()
            own = config if subject is subjects[0] else None
            rank_cases += _verify_one(subject, own, device, num_ranks, tell)
        if rank_cases:
            for row in run_rank_cases(rank_cases, folder / "ranks"):
                tell(row)
    report = Report(tuple(rows), tuple(_notes(config, exact, device)))
    content = {"rows": [row.to_json() for row in report.rows], "notes": report.notes, "passed": not report.failed}
    Storage().write_json(config.folder / "verify.json", content)
    return report


def exact_config(config: Config, exact: Exact, folder: Path) -> Config:
    """The same run in wide arithmetic and without dropout: what is left to differ is a mistake, or the last bits."""
    base = config.base
    if base.storage != "model":
        # products with fp8 storage are float8 in any precision; 4-bit weights can be multiplied as what they stand for
        dense = {"storage": "model", "compute": "auto"}
        base = base.model_copy(update=dense if base.storage == "fp8" else {"compute": "model"})
    return config.model_copy(
        update={
            "run_dir": folder,
            "model": config.model.model_copy(update={"precision": exact}),
            "lora": config.lora.model_copy(update={"dropout": 0.0}),
            "base": base,
            "full": config.full.model_copy(update={"weights": "fp32", "compute": "model", "update": "step"}),
            # each row over ranks sets its own
            "strategy": "auto",
            "sharding": config.sharding.model_copy(update={"replicas": None, "offload": False}),
            "comm": config.comm.model_copy(update={"compress": "none"}),
        }
    )


def _notes(config: Config, exact: Exact, device: torch.device) -> Iterator[str]:
    yield f"reference: transformers' own forward pass, one sample at a time, in {exact} on {device.type}"
    if config.method == "lora":
        yield "LoRA's products by PEFT; B of a fresh adapter is moved from zero, where A would have no gradient"
        if config.lora.dropout:
            yield "lora.dropout is 0 here: with dropout a step has no one right answer"
    if config.comm.compress != "none":
        yield f"comm.compress is none here: sums in {config.comm.compress} are rounded"
    if config.sharding.offload:
        yield "sharding.offload is false here: where state waits changes no sum"
    if config.base.storage == "fp8" and config.method == "lora":
        yield f"float8 products are not exact: rows in {exact} have the weights as they are in the files"


def _family_subjects(own: Subject, folder: Path) -> Iterator[Subject]:
    """Tiny random models of other architectures on the run's own samples and settings."""
    planned = plan_quietly(own.config, Rank())
    for family in FAMILIES:
        model_dir = write_family(folder / "models" / family, family, planned.store)
        model = own.config.model.model_copy(update={"name": str(model_dir), "revision": None, "init": "random"})
        data = own.config.data.model_copy(update={"tokenizer": tokenizer_name(own.config)})
        lora = own.config.lora.model_copy(update={"targets": "all-linear", "continue_from": None})
        changes = {"model": model, "data": data, "lora": lora, "freeze": []}
        yield replace(own, label=family, config=own.config.model_copy(update=changes), folder=folder / family)


def _verify_one(
    subject: Subject, own: Config | None, device: torch.device, num_ranks: int, tell: Callable[[Row], None]
) -> list[RankCase]:
    """The rows of one process; returns the cases that need several. `own` adds rows in the run's own precision."""
    planned = plan_quietly(subject.config, Rank())
    step = next((step for step in planned.plan.steps() if step.num_label_tokens), None)
    if step is None:
        raise UsageError("verify: no step of this run has a label token")
    config = subject.config.model_copy(update={"batch": _batch_for(subject.config, planned, step, device)})
    planned = plan_quietly(config, Rank())
    step = planned.plan.step(step.index)
    samples = [planned.store.sample(sample_id) for sample_id in step.sample_ids]
    max_tokens = planned.plan.layout.micro_batch_tokens
    plain = plain_model(config, device, subject.adapter)
    reference = Reference.write(subject.reference, plain_step(plain, samples), gradients_of(plain))
    tell(
        _plain_row(plain, samples, max_tokens, reference, subject.named("padded, plain transformers")).judged(
            subject.limit
        )
    )
    del plain
    free_memory()
    trained = config.model_copy(update={"lora": config.lora.model_copy(update={"continue_from": subject.adapter})})
    if config.method == "full":
        trained = config
    try:
        with set_up_quietly(trained, planned, Rank(), subject.folder) as run:
            for row in _cut_rows(run, step, reference):
                tell(replace(row, case=subject.named(row.case)).judged(subject.limit))
    except (UsageError, NumericError) as error:
        tell(Row(subject.named("packed"), limit=subject.limit, note=str(error)))
        return []
    if own is not None and resolve_precision(own.model.precision, device) != resolve_precision(
        trained.model.precision, device
    ):
        for row in _own_rows(own, trained, device, reference, step.index):
            tell(row)
    return _rank_cases(subject, trained, planned, step, num_ranks)


def _batch_for(config: Config, planned: Planned, step: StepPlan, device: torch.device) -> Any:
    """On the CPU a micro-batch may hold the whole step; on a GPU what the plan allows."""
    longest = int(planned.store.lengths.max())
    planned_tokens = planned.plan.layout.micro_batch_tokens
    wanted = max(planned_tokens, min(step.num_tokens, CPU_TOKENS)) if device.type == "cpu" else planned_tokens
    return config.batch.model_copy(update={"micro_batch_tokens": max(longest, wanted)})


def gradients_of(plain: PlainModel) -> dict[str, torch.Tensor]:
    """The plain model's gradients; zeros where the step does not reach a parameter."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in plain.named.items()
    }


def _plain_row(
    plain: PlainModel,
    samples: list[tuple[NDArray[Any], NDArray[Any]]],
    max_tokens: int,
    reference: Reference,
    case: str,
) -> Row:
    loss = plain_step(plain, samples, max_tokens=max_tokens)
    gradients = gradients_of(plain)
    norm = float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())
    return reference.compare(case, loss, norm, gradients.items())


def _cut_rows(run: Run, step: StepPlan, reference: Reference) -> Iterator[Row]:
    """The step packed into as few micro-batches as fit, then into more, at last each of its samples alone."""
    places = run.plan.samples.places_of(step.sample_ids)
    lengths, labels = run.plan.samples.lengths[places].tolist(), run.plan.samples.num_labels[places].tolist()
    alone = tuple(MicroBatch((i,), n, m) for i, n, m in zip(step.sample_ids, lengths, labels, strict=True))
    cuts: dict[int, tuple[MicroBatch, ...]] = {}
    for wanted in range(1, MAX_MICRO_BATCHES + 1):
        # a little room, or samples of uneven lengths need one micro-batch more
        tokens = max(*lengths, -(-step.num_tokens // wanted) + max(lengths) // 8)
        batches = run.plan.cut_again(step, 0, min(run.plan.layout.micro_batch_tokens, tokens))
        cuts.setdefault(len(batches), batches)
    cuts[len(alone)] = alone
    for num, batches in sorted(cuts.items()):
        case = "packed" if num == 1 else "each sample alone" if num == len(alone) else f"packed, {num} micro-batches"
        yield measure(run, replace(step, ranks=(batches,)), reference, case)


def _own_rows(
    own: Config, trained: Config, device: torch.device, reference: Reference, step_index: int
) -> Iterator[Row]:
    """The run's own precision: what plain transformers loses to it, and the run within a few times that."""
    config = own.model_copy(
        update={
            "run_dir": trained.run_dir,
            "lora": trained.lora,
            "full": own.full.model_copy(update={"update": "step"}),
            "strategy": trained.strategy,
            "sharding": trained.sharding,
        }
    )
    name = str(resolve_precision(config.model.precision, device)).removeprefix("torch.")
    planned = plan_quietly(config, Rank())
    step = planned.plan.step(step_index)
    samples = [planned.store.sample(sample_id) for sample_id in step.sample_ids]
    adapter = config.lora.continue_from or Path()
    plain = plain_model(config.model_copy(update={"base": trained.base}), device, adapter)
    max_tokens = planned.plan.layout.micro_batch_tokens
    noise = _plain_row(plain, samples, max_tokens, reference, f"plain transformers in {name}")
    del plain
    free_memory()
    yield replace(noise, verdict="noise")
    least = LIMITS["fp32"] if name in ("float32", "float64") else LEAST_LIMIT
    limit = max(TIMES_PLAIN * noise.largest, FP8_LIMIT if config.computes_in_fp8 else least)
    with set_up_quietly(config, planned, Rank(), trained.folder) as run:
        yield measure(run, step, reference, f"packed in {name}, as the run computes").judged(limit)


def _rank_cases(subject: Subject, trained: Config, planned: Planned, step: StepPlan, num_ranks: int) -> list[RankCase]:
    """Every strategy on the numbers of ranks it is wanted for, each rank with two micro-batches where that is possible.

    The run's `sharding` settings are kept, but for those that only one strategy knows.
    """
    cases = []
    longest, budget = int(planned.store.lengths.max()), planned.plan.layout.micro_batch_tokens
    for case in STRATEGIES:
        for world in range(case.min_ranks, num_ranks + 1):
            if world != num_ranks and not case.every_number:
                continue
            tokens = max(longest, min(budget, -(-step.num_tokens // (2 * world))))
            values = trained.model_dump(mode="json")
            values["strategy"] = case.strategy
            values["batch"]["micro_batch_tokens"] = tokens
            values["sharding"] |= case.sharding
            cases.append(
                RankCase(subject.named(case.strategy), world, values, step.index, str(subject.reference), subject.limit)
            )
    return cases
