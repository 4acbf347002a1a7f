"""The child process of studio for what is slow: building and showing data, planning, answering.

It reads one JSON request a line from stdin and answers in JSON lines on stdout: `log`, `progress` or `piece` any number
of times, then `result` or `error`. It calls what `flatout data build`, `plan` and `chat` call.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.api.commands import end_with_parent
from flatout.api.runs import free_folder
from flatout.api.settings import words_of
from flatout.errors import FlatoutError, ResourceError, first_line
from flatout.io.redact import printable, redacted
from flatout.studio.workspace import Workspace

if TYPE_CHECKING:
    import torch

    from flatout.api.models import RunAndBase

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
            emit(error=printable(redacted(words_of(error))), exit_code=error.exit_code)
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
    from flatout.api.data import open_or_build

    open_or_build(
        config,
        lambda text: emit(log=text),
        replaces=replaces,
        reads_again=replaces,
        progress=lambda done, total: emit(progress=[done, total]),
    )
    return config.data.name


def columns(source: str, emit: Emit) -> dict[str, Any]:
    """Return the columns of a file's first row, each with how its value begins, and what to make of them.

    `problem` is empty if a format has these columns. Else `columns` are the ones that would make it readable, if any.
    """
    workspace = _workspace()
    from flatout.api.data import recognize_columns

    path = workspace.inside(source)
    row, columns, problem = recognize_columns(path, workspace.relative(path))
    shown = {name: f"{value}"[:60] for name, value in row.items() if value is not None}
    return {"found": shown, "columns": columns, "problem": problem}


def samples(name: str, first: int, count: int, emit: Emit) -> dict[str, Any]:
    """Return `count` samples of a data set from number `first` on, and what is known of the whole set, as HTML."""
    emit(log="loading the data set and its tokenizer")
    from flatout.api.data import load_tokenizer, open_data_set
    from flatout.view.samples import overview, sample_list, statistics

    store = open_data_set(name, _workspace().data_root, verify=False)
    tokenizer = load_tokenizer(store.meta.tokenizer, added=store.meta.added_tokens)
    listed = sample_list(store, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), first, count)
    facts = {} if first else {"overview": overview(store), "statistics": statistics(store)}
    return {"samples": listed, "num_samples": store.num_samples, **facts}


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
    from flatout.api.prepare import plan_config
    from flatout.api.runs import MemoryCallback

    class Page(MemoryCallback):
        """Writes each stage as a line of the answer, and keeps events."""

        def on_stage(self, name: str, text: str) -> None:
            emit(log=f"{name}: {text}")

    summary = plan_config(config, device, callback=(callback := Page()), tokens_per_s=tokens_per_s)
    totals, memory = summary.totals, summary.totals.memory
    return {
        "rows": list(summary.rows(callback.events)),
        "memory_parts": memory.parts if memory else {},
        "num_steps": totals.num_steps,
        "num_tokens": totals.num_tokens,
        "padding_avoided": totals.padding_avoided,
        "time_s": totals.time_s,
        "measured_in": measured_in,
        "settings": config.model_dump(mode="json"),
    }


# the run that was last asked, by its folder and the time of its export
_MODELS: dict[tuple[str, int], RunAndBase] = {}


def _loaded(folder: Path, device: torch.device, emit: Emit) -> RunAndBase:
    from flatout.api.models import RunAndBase

    results = next((one for one in (folder / "final", folder / "checkpoints") if one.is_dir()), folder)
    key = (str(folder), results.stat().st_mtime_ns)
    if key not in _MODELS:
        _MODELS.clear()
        _MODELS[key] = RunAndBase.load(folder, device)
        if _MODELS[key].note:
            emit(note=_MODELS[key].note)
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
    loaded, chats = _loaded(folder, device, emit), {}
    for side in ("run", "base") if loaded.base is not None else ("run",):
        messages = []
        for turn in turns:
            if "system" in turn:
                messages.append({"role": "system", "content": turn["system"]})
                continue
            messages += [{"role": "user", "content": turn["prompt"]}, {"role": "assistant", "content": turn[side]}]
        messages.append({"role": "user", "content": prompt})
        with redirect_stdout(_Pieces(emit, side)):
            chats[side] = loaded.answer(
                messages, by_base=side == "base", max_new_tokens=max_new_tokens, temperature=temperature
            )
    return chats


def out(folder: str, to: str, emit: Emit) -> dict[str, str]:
    """Merge a run's adapter, or write the run for another program; return where, and the command to use it."""
    workspace = _workspace()
    run_dir = workspace.inside(folder)
    target = free_folder(run_dir / to)
    emit(log=f"writing {workspace.relative(target)}")
    if to == "merged":
        from flatout.api.models import merge_adapter

        said = merge_adapter(str(run_dir), target, device="cpu")
        return {"path": workspace.relative(target), "command": said}
    from flatout.api.models import export_model

    program, _, kind = to.partition("-")
    written = export_model(str(run_dir), program, target, kind=kind or None)
    return {"path": workspace.relative(target), "command": written.command}


def push(folder: str, repo: str, merged: bool, private: bool, emit: Emit) -> dict[str, str]:
    """Push a run to the hub with the token of this user; return its address."""
    run_dir = _workspace().inside(folder)
    emit(log=f"pushing to {repo}")
    from flatout.api.run import Run

    return {"path": Run(run_dir).push_to_hub(repo, merged=merged, private=private), "command": ""}


if __name__ == "__main__":
    main()
