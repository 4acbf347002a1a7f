"""What precedes a run, from Python: data sets, plans, and the proof that a run's step is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.api.inputs import data_file, listed_paths, tokenizer_folder
from flatout.api.start import ConfigLike, refuse_unnamed, resolve_config
from flatout.config import schema
from flatout.config.data import DataConfig
from flatout.config.problems import problem_of, problems_error
from flatout.config.read import make_config
from flatout.config.shortcuts import expand
from flatout.config.spelling import in_build_data, in_python, spelled_for
from flatout.errors import UsageError
from flatout.parallel.rank import Rank
from flatout.planner.devices import Device, find_device
from flatout.track.callback import Callback, Reporter

if TYPE_CHECKING:
    from flatout.data.token_store import TokenStore
    from flatout.trainer.preview import PlanSummary
    from flatout.verifier.compare import Comparison


class _Checked(type(schema.Config)):  # type: ignore[misc]
    """Makes a `schema.Config`, so that it equals, and is an instance of, what the rest of flatout returns."""

    def __call__(cls, **settings: Any) -> schema.Config:
        with spelled_for(in_python):
            make_config(expand(settings))
        return schema.Config(**settings)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, schema.Config)


class Config(schema.Config, metaclass=_Checked):
    """The settings of a run, by section or keyword. Raises ProblemsError with every problem, in one sentence each."""

    @classmethod
    def model_validate(cls, *values: Any, **options: Any) -> schema.Config:  # type: ignore[override]
        """Validate as pydantic does; what it returns is what `flatout.Config(...)` returns."""
        return schema.Config.model_validate(*values, **options)


@spelled_for(in_build_data)
def build_data(data: Any, *, tokenizer: Any, name: str, replace: bool = False, **settings: Any) -> TokenStore:
    """Tokenize data into a named data set, as `flatout data build` does; an unchanged one is opened.

    `data` as for `flatout.train`, or a list of paths; `settings` are those of the `data` section. `replace` replaces
    another data set of that name, and reads pictures again. Raises DataError and UsageError with what is wrong.
    """
    from pydantic import ValidationError

    from flatout.data.build import open_or_build

    try:
        config = DataConfig.model_validate({"name": name, **settings})
    except ValidationError as error:
        raise problems_error("build_data", [problem_of(one) for one in error.errors()]) from error
    paths = listed_paths(data) or [data_file(data, config.root / "in_memory")]
    sources = DataConfig.model_validate({"sources": [{"path": path} for path in paths]}).sources
    config = config.model_copy(update={"sources": sources})
    folder = tokenizer_folder(tokenizer, config.root / "tokenizers")
    return open_or_build(config, folder, replaces=replace, reads_again=replace)


@spelled_for(in_python)
def plan(
    config: ConfigLike = None,
    *unnamed: Any,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    ranks: int = 1,
    device: str | None = None,
    **settings: Any,
) -> PlanSummary:
    """Plan a run, as `flatout plan` does, without a GPU; print the result to read it.

    `device` names the GPU to plan memory for, such as h100, 4090 or 12GB; cpu and cuda are the setting. By default, the
    plan is for this machine. Model, tokenizer and data as for `flatout.train`, which says what is raised before a model
    is loaded.
    """
    refuse_unnamed("plan", config, unnamed)
    if device in ("auto", "cpu", "cuda"):
        settings, device = {**settings, "device": device}, None
    gpu = None if device is None else find_device(device)
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}; expected at least 1")
    return _plan(resolve_config(config, settings, model=model, tokenizer=tokenizer, data=data), Rank(0, ranks), gpu)


def _plan(
    config: schema.Config, rank: Rank, gpu: Device | None, *callbacks: Callback, tokens_per_s: float | None = None
) -> PlanSummary:
    """Plan for a GPU; without one for this machine's, or say why the run does not fit on it."""
    from flatout.trainer.planned_run import open_and_plan
    from flatout.trainer.preview import plan_at_hand, summarize_plan

    reporter = Reporter(*callbacks)
    if gpu is not None:
        return summarize_plan(config, open_and_plan(config, reporter, rank, gpu), tokens_per_s)
    planned, why_not = plan_at_hand(config, reporter, rank)
    return summarize_plan(config, planned, tokens_per_s, why_not)


def plan_config(
    config: schema.Config, device: str = "", *, callback: Callback | None = None, tokens_per_s: float | None = None
) -> PlanSummary:
    """Plan a checked configuration on its own GPUs, for `device` (empty: the one of this machine).

    `callback` gets stages and events, `tokens_per_s` is a measured speed. Raises UsageError without weights.
    """
    from flatout.models.load.source import weight_files
    from flatout.trainer.steps_and_memory import gpu_of

    if config.model.init == "pretrained" and not weight_files(config.model.name, config.model.revision):
        raise UsageError(f"{config.model.name} has no *.safetensors weights; choose a model that has")
    rank = Rank(0, len(config.gpus or [0]))
    gpu = find_device(device) if device else gpu_of(config, rank)
    return _plan(config, rank, gpu, *[] if callback is None else [callback], tokens_per_s=tokens_per_s)


@spelled_for(in_python)
def verify(config: ConfigLike = None, *, ranks: int = 2, fp64: bool = False, **settings: Any) -> list[Comparison]:
    """Compare this run's step with plain transformers, as `flatout verify` does; return one row per way to compute it.

    Raises NumericError if one differs.
    """
    from flatout.verifier.run import require_equal
    from flatout.verifier.run import verify as verify_run

    rows, _ = verify_run(resolve_config(config, settings), num_ranks=ranks, exact="fp64" if fp64 else "fp32")
    require_equal(rows)
    return rows
