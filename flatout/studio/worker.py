"""The child process of studio for what is slow: building and showing data, planning, answering.

It reads one JSON request a line from stdin and answers in JSON lines on stdout: `log`, `progress` or `piece` any number
of times, then `result` or `error`. It calls what `flatout data build`, `plan` and `chat` call.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config.folders import free_folder
from flatout.config.spelling import in_studio, spelled
from flatout.errors import FlatoutError, ResourceError, UsageError, first_line
from flatout.io.redact import printable, redacted
from flatout.launch.ranks import end_with_parent
from flatout.studio.workspace import Workspace
from flatout.track.callback import MemoryCallback, Reporter

if TYPE_CHECKING:
    import torch

Emit = Callable[..., None]
"""Called as `emit(log="...")`: writes one line of the answer."""


def main() -> None:
    """Answer requests until stdin ends, or until the server does."""
    end_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the answers

    def emit(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    functions: dict[str, Callable[..., Any]] = {
        "build": build, "columns": columns, "samples": samples, "plan": plan, "chat": chat, "out": out, "push": push,
    }  # fmt: skip
    for text in sys.stdin:
        request = json.loads(text)
        try:
            emit(result=functions[request.pop("kind")](emit=emit, **request))
        except FlatoutError as error:
            emit(error=printable(redacted(spelled(error, in_studio))), exit_code=error.exit_code)
        except Exception as error:  # noqa: BLE001  (the page says so, and the worker lives on)
            sys.excepthook(type(error), error, error.__traceback__)  # the terminal of studio has the whole of it
            emit(error=f"unexpected {type(error).__name__}: {printable(redacted(first_line(error)))}")


def _workspace() -> Workspace:
    return Workspace(Path(), [Path(folder) for folder in sys.argv[1:]])


def build(
    settings: Mapping[str, str],
    overrides: Sequence[str],
    source: str,
    format: str,
    columns: Mapping[str, str],
    replaces: bool,
    emit: Emit,
) -> str:
    """Tokenize a file of the workspace into a data set; return its name. `settings` are those of `data`."""
    workspace = _workspace()
    path = workspace.relative(workspace.inside(source))
    sources = json.dumps([{"path": path, "hub": False, "format": format, "columns": columns}])
    config = workspace.config(settings, [f"data.sources={sources}", *overrides])
    emit(log=f"loading the tokenizer of {config.model.name}")
    from flatout.data.build import open_or_build

    open_or_build(
        config.data,
        config.model.name,
        replaces=replaces,
        reads_again=replaces,
        progress=lambda done, total: emit(progress=[done, total]),
        log=lambda text: emit(log=text),
    )
    return config.data.name


def columns(source: str, emit: Emit) -> dict[str, Any]:
    """Return the columns of a file's first row, each with how its value begins, and what to make of them.

    `problem` is empty if a format has these columns. Else `columns` are the ones that would make it readable, if any.
    """
    workspace = _workspace()
    from flatout.config.schema import SourceConfig
    from flatout.data.rows.archives import read_file
    from flatout.data.rows.formats.parser import ColumnsError, make_parser
    from flatout.data.rows.read import raise_error
    from flatout.data.rows.sources import Unread
    from flatout.errors import DataError

    path = workspace.inside(source)
    row = next(read_file(path, raise_error, Unread("", "skip")), None)
    if row is None:
        raise DataError(f"{source} has no rows; choose another file")
    unknown = "no known format has these columns"
    shown = {name: f"{value}"[:60] for name, value in row.columns.items() if value is not None}
    try:
        make_parser(SourceConfig(path=workspace.relative(path), hub=False), row)
    except ColumnsError as error:
        return {"found": shown, "columns": error.fixes[0].settings["data.sources"][0]["columns"], "problem": unknown}
    except DataError as error:
        return {"found": shown, "columns": {}, "problem": unknown if unknown in str(error) else str(error)}
    return {"found": shown, "columns": {}, "problem": ""}


def samples(name: str, first: int, count: int, emit: Emit) -> dict[str, Any]:
    """Return `count` samples of a data set from number `first` on, and what is known of the whole set, as HTML."""
    emit(log="loading the data set and its tokenizer")
    from flatout.data import registry
    from flatout.data.token_store import TokenStore
    from flatout.data.tokenizer import load_tokenizer
    from flatout.view.samples import overview, sample_list, statistics

    root = _workspace().data_root
    store = TokenStore.open(registry.entry_dir(root, registry.find(root, name)), verify=False)
    tokenizer = load_tokenizer(store.meta.tokenizer, added=store.meta.added_tokens)
    listed = sample_list(store, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), first, count)
    facts = {} if first else {"overview": overview(store), "statistics": statistics(store)}
    return {"samples": listed, "num_samples": store.num_samples, **facts}


@dataclass
class _PageCallback(MemoryCallback):
    """Keeps what planning reports, and writes each stage as a line of the answer."""

    emit: Emit = print

    def on_stage(self, name: str, text: str) -> None:
        self.emit(log=f"{name}: {text}")


def plan(
    settings: Mapping[str, str],
    overrides: Sequence[str],
    device: str,
    tokens_per_s: float | None,
    emit: Emit,
    measured_in: str = "",
) -> dict[str, Any]:
    """Plan the run of a form for `device` (empty: the one of this machine); return its figures and its rows of text."""
    config = _workspace().config(settings, overrides)
    emit(log="loading torch and transformers")
    from flatout.models.load.source import weight_files
    from flatout.parallel.rank import Rank
    from flatout.planner.devices import find_device
    from flatout.trainer.gpu import gpu_of
    from flatout.trainer.planned_run import open_and_plan
    from flatout.trainer.preview import summarize_plan

    if config.model.init == "pretrained" and not weight_files(config.model.name, config.model.revision):
        raise UsageError(f"{config.model.name} has no *.safetensors weights; choose a model that has")
    rank, callback = Rank(0, len(config.gpus or [0])), _PageCallback(emit=emit)
    gpu = find_device(device) if device else gpu_of(config, rank)
    planned = open_and_plan(config, Reporter(callback), rank, gpu)
    summary = summarize_plan(config, planned, tokens_per_s)
    totals, memory = summary.totals, summary.totals.memory
    parts = ("weights", "adapter", "gradients", "optimizer", "activations", "working")
    return {
        "rows": list(summary.rows(callback.events)),
        "memory_parts": {name: getattr(memory, f"{name}_bytes") for name in parts} if memory else {},
        "num_steps": totals.num_steps,
        "num_tokens": totals.num_tokens,
        "padding_avoided": totals.padding_avoided,
        "time_s": totals.time_s,
        "measured_in": measured_in,
        "settings": config.model_dump(mode="json"),
    }


# the run that was last asked, as its folder and the time of its export: model, tokenizer, base
_MODELS: dict[tuple[str, int], tuple[Any, Any, Any]] = {}


def _loaded(folder: Path, device: torch.device, emit: Emit) -> tuple[Any, Any, Any]:
    """Return a run's model, its tokenizer, and its base: the model itself under its adapter, another, or None."""
    from flatout.config.folders import is_run_folder
    from flatout.config.read import load_config
    from flatout.models.load.inference import load_for_inference, load_trained, resolve_model_paths
    from flatout.trainer.load_stopped import load_stopped

    is_run, is_finished = is_run_folder(folder), (folder / "final").is_dir()
    results = folder / ("final" if is_finished else "checkpoints")
    key = (str(folder), (results if results.is_dir() else folder).stat().st_mtime_ns)
    if key in _MODELS:
        return _MODELS[key]
    _MODELS.clear()
    if is_run and not is_finished:
        model, tokenizer, step = load_stopped(folder, device)
        emit(note=f"this run is not finished: it answers as it was after step {step:,}")
        is_adapted = load_config(folder / "config.yaml").method == "lora"
    else:
        paths = resolve_model_paths(str(folder))
        model, tokenizer = load_trained(paths, device=device)
        is_adapted = paths.adapter is not None
    base = model
    if not is_adapted and not is_run:
        base = None  # a model that no run has trained
    elif not is_adapted:
        began = load_config(folder / "config.yaml").model
        is_random = began.init == "random"
        base = None if is_random else load_for_inference(began.name, revision=began.revision, device=device)
    _MODELS[key] = model, tokenizer, base
    return _MODELS[key]


@dataclass
class _Pieces(TextIOBase):
    """What `answer` prints while it generates, as lines of the answer to the page."""

    emit: Emit
    side: str

    def write(self, text: str) -> int:
        self.emit(piece=text, side=self.side)
        return len(text)


def chat(
    run: str,
    turns: Sequence[Mapping[str, str]],
    prompt: str,
    max_new_tokens: int,
    temperature: float | None,
    gpus_in_use: Mapping[str, Sequence[int]],
    emit: Emit,
) -> dict[str, str]:
    """Answer `prompt` with a run's model and with its base; return both answers by side.

    `turns` are the earlier ones: `prompt`, and each side's own answer; the first may be a `system` prompt alone. Sides
    are `run` and, if there is one, `base`.
    Raises ResourceError if a run trains on the same GPU; `gpus_in_use` has those of each run that trains.
    """
    folder = _workspace().inside(run, is_model=True)
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for other, gpus in gpus_in_use.items():
        if device.type == "cpu":
            emit(note=f"{other} trains on this machine meanwhile: the run and the chat are both slower")
        elif 0 in gpus:
            raise ResourceError(f"{other} trains on GPU 0, which the chat needs too; stop it, or wait for its end")
    emit(log=f"loading {run} and its base model")
    from flatout.models.lora.layer import without_adapter
    from flatout.rollout.chat import Sampling, answer

    model, tokenizer, base = _loaded(folder, device, emit)
    chats = {}
    for side, one in (("run", model), ("base", base)):
        if one is None:
            continue
        messages = []
        for turn in turns:
            if "system" in turn:
                messages.append({"role": "system", "content": turn["system"]})
                continue
            messages += [{"role": "user", "content": turn["prompt"]}, {"role": "assistant", "content": turn[side]}]
        messages.append({"role": "user", "content": prompt})
        adapted = without_adapter(model) if side == "base" and base is model else nullcontext()
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": Sampling(temperature), "stream": True}
        with redirect_stdout(_Pieces(emit, side)), adapted:
            chats[side] = answer(one, tokenizer, messages, **options)
    return chats


def out(folder: str, to: str, emit: Emit) -> dict[str, str]:
    """Merge a run's adapter, or write the run for another program; return where, and the command to use it."""
    workspace = _workspace()
    run_dir = workspace.inside(folder)
    target = free_folder(run_dir / to) if (run_dir / to).exists() else run_dir / to
    emit(log=f"writing {workspace.relative(target)}")
    if to == "merged":
        from flatout.models.export import merge_adapter

        said = merge_adapter(str(run_dir), target, device="cpu")
        return {"path": workspace.relative(target), "command": said}
    from flatout.export.write import export

    program, _, kind = to.partition("-")
    written = export(str(run_dir), program, target, kind=kind or None)
    return {"path": workspace.relative(target), "command": written.command}


def push(folder: str, repo: str, merged: bool, private: bool, emit: Emit) -> dict[str, str]:
    """Push a run to the hub with the token of this user; return its address."""
    run_dir = _workspace().inside(folder)
    emit(log=f"pushing to {repo}")
    from flatout.export.push import push as push_run

    return {"path": push_run(run_dir, repo, merged=merged, private=private), "command": ""}


if __name__ == "__main__":
    main()
