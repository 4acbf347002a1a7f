"""Evaluates one model by lm-eval's tasks, own questions or rows: says how good it is, and writes the results."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from flatout.config.folders import is_run_folder
from flatout.config.read import load_config
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
from flatout.data.preference_columns import in_order_of
from flatout.data.prompt_file import Prompt
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, UsageError
from flatout.eval.tasks import Tasks, score_tasks
from flatout.io.durable_io import DurableIO
from flatout.io.gpu_driver import no_gpu_error
from flatout.io.json_file import encode_json, now_utc
from flatout.io.own_output import write_output
from flatout.io.redact import redacted
from flatout.models.export import merge
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.inference import ModelPaths, load_trained
from flatout.models.scoring import scores_of
from flatout.rollout.chat import Sampling, answer_all, prompt_ids
from flatout.track.console import ConsoleCallback

# settings of a run's data that decide what a row's tokens are
_OF_ROWS = {"max_tokens", "too_long", "template", "template_args", "special_tokens", "lost_reasoning", "end_of_turn"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model that is loaded, and where its results go."""

    target: str
    """The run, adapter, model or hub id as it was named."""
    paths: ModelPaths
    model: Any
    tokenizer: Any
    limit: int | None
    """Use only so many samples of each task or file."""
    num_merged: int
    """How many adapter layers were merged into the base weights."""
    out: Path | None
    """The file of the results; None: in the target's folder."""

    def score_tasks(self, tasks: Tasks, *, batch_size: int, chat: bool) -> list[str]:
        """Score lm-eval's tasks; return the lines to print."""
        # not the stream that `score_tasks` takes the bars from
        with ConsoleCallback(Console(file=sys.stderr)) as console:
            rows = score_tasks(
                self.model, self.tokenizer, tasks, on_phase=console.on_phase, limit=self.limit, batch_size=batch_size,
                chat=chat,
            )  # fmt: skip
        lines = [f"{'task':<32} {'metric':<20} {'value':>8} {'+-':>8} {'n':>7}"]
        for row in rows:
            value, stderr = ("-" if row[name] is None else f"{row[name]:.4f}" for name in ("value", "stderr"))
            name, count = row["task"][:32], row["num_samples"] or "-"
            lines.append(f"{name:<32} {row['metric'][:20]:<20} {value:>8} {stderr:>8} {count:>7}")
        return [*lines, self._write(task_file(tasks.names), {"chat": chat, "tasks": rows})]

    def score_answers(
        self, name: str, prompts: Sequence[Prompt], *, ignore_case: bool, max_new_tokens: int
    ) -> list[str]:
        """Compare greedy answers with those that are accepted, without space around them; return the lines to print.

        Raises UsageError for a tokenizer without chat template, DataError for a picture that its processor refuses.
        """

        def compared(text: str) -> str:
            return text.strip().casefold() if ignore_case else text.strip()

        num, num_ended, ids = len(prompts), 0, list[Sequence[int]]()
        with _progress() as console:
            console.on_phase("reading prompts")
            for number, prompt in enumerate(prompts, start=1):
                try:
                    ids.append(prompt_ids(self.model, self.tokenizer, prompt.messages, prompt.pictures))
                except (DataError, UsageError) as error:
                    raise error.at(prompt.origin or f"prompt {number}") from error

            def report_token(prompt: int, is_last: bool, silent_s: float) -> None:
                nonlocal num_ended
                num_ended += is_last
                console.on_phase("answering prompts", num_ended, num)

            texts = answer_all(
                self.model, self.tokenizer, ids, max_new_tokens=max_new_tokens, sampling=Sampling(temperature=0.0),
                on_token=report_token,
            )  # fmt: skip
        answers, num_right = list[dict[str, Any]](), 0
        for prompt, text in zip(prompts, texts, strict=True):
            is_right = compared(text) in map(compared, prompt.accepted)
            answers.append({"prompt": prompt.text, "answer": text, "accepted": [*prompt.accepted], "right": is_right})
            num_right += is_right
        facts: dict[str, Any] = {"ignore_case": ignore_case, "max_new_tokens": max_new_tokens, "num_prompts": num}
        facts |= {"num_right": num_right, "exact_match": num_right / num}
        line = f"exact match: {num_right} of {num} right ({num_right / num:.1%})"
        return [line, self._write(name, {**facts, "answers": answers})]

    def score_rows(self, file: Path) -> list[str]:
        """Score pairs, or texts with labels; return the lines to print. Rows are read as the run's were."""
        if not is_scoring(self.model.config):
            raise UsageError(f"--rows: {self.target} generates text and gives no scores; use --answers or --tasks")
        labels = [str(self.model.config.id2label[index]) for index in range(self.model.config.num_labels)]
        settings, known, source = Path(self.target) / "config.yaml", dict[str, Any](), dict[str, Any]()
        if is_run_folder(settings.parent):
            data = load_config(settings).data
            known = data.model_dump(include=_OF_ROWS, exclude_unset=True)
            source = data.sources[0].model_dump(include={"columns", "keys", "roles", "system"}) if data.sources else {}
        form = {"path": str(file), "hub": False, "format": "classify" if len(labels) > 1 else "auto"}
        with _progress() as console, tempfile.TemporaryDirectory() as root:
            console.on_phase("reading rows")
            given = {"name": "rows", "root": root, "tokenizer": self.paths.tokenizer, "sources": [{**source, **form}]}
            config = DataConfig.model_validate({**known, **given, "num_samples": self.limit, "shuffle": False})
            store = open_or_build(config, self.paths.base, log=lambda text: console.on_stage("tokens", text))
            texts = [store.sample(index).token_ids for index in range(store.num_samples)]
            scores = scores_of(self.model, texts, lambda done, total: console.on_phase("scoring rows", done, total))
            judged = judge(scores, store, labels)
        num = judged.get("num_pairs") or judged["num_samples"]
        lines = [f"accuracy: {judged['num_right']} of {num} right ({judged['accuracy']:.1%})"]
        lines += [f"macro F1: {judged['macro_f1']:.4f}"] if len(labels) > 1 else []
        return [*lines, self._write(file.stem, judged)]

    def _write(self, name: str, content: dict[str, Any]) -> str:
        """Write results to `out`, or into the target's folder, and say where; those of a hub id are only shown."""
        folder = Path(self.target)
        file = self.out or (folder / "eval" / f"{safe_name(name)}.json" if folder.is_dir() else None)
        if file is None:
            return "not written, as the model is a hub id; name a file with --out"
        adapter = None if self.paths.adapter is None else str(self.paths.adapter)
        facts = {"model": redacted(self.paths.base), "adapter": adapter, "merged": bool(self.num_merged)}
        DurableIO().make_dir(file.parent)
        written = {"written_at": now_utc(), **facts, "limit": self.limit, **content}
        write_output(file, encode_json(written), "eval")
        return f"written to {file}"


def load(
    target: str, paths: ModelPaths, *, device: str, merged: bool, writes: bool, limit: int | None, out: Path | None
) -> Evaluation:
    """Load a model to evaluate; `writes`: it generates text. Raises ResourceError for a missing GPU, UsageError."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise no_gpu_error("--device cuda")
    if merged and paths.adapter is None:
        raise UsageError(f"--merged: {target} has no adapter to merge; leave it out")
    with _progress() as console:
        console.on_phase(f"loading {paths.base}")
        place = torch.device("cuda" if has_gpu and device != "cpu" else "cpu")
        model, tokenizer = load_trained(paths, device=place, writes=writes)
    return Evaluation(target, paths, model, tokenizer, limit, merge(model) if merged else 0, out)


def task_file(names: Sequence[str]) -> str:
    """Return the name of the results of tasks, without its ending."""
    return "-".join(names)


def safe_name(name: str) -> str:
    """Return a name as that of a file."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]


def _progress() -> ConsoleCallback:
    return ConsoleCallback(Console(stderr=True))


def judge(scores: NDArray[np.float64], store: TokenStore, labels: Sequence[str]) -> dict[str, Any]:
    """Return how well scores (N, K) agree with a data set: with its pairs for one score, else with its labels.

    Raises DataError for a data set of another kind, and for labels that the model does not know.
    """
    if len(labels) == 1:
        if not store.meta.counts.get("pairs"):
            raise DataError(f"{store.meta.sources[0]} has no pairs, which a model with one score is judged by")
        chosen, rejected = scores[::2, 0], scores[1::2, 0]
        right = int((chosen > rejected).sum())
        figures = {"margin": float((chosen - rejected).mean()), "mean_reward": float(scores.mean())}
        return {"num_pairs": len(chosen), "num_right": right, "accuracy": right / len(chosen), **figures}
    true = np.asarray(in_order_of(store, labels).extra["class"])
    predicted = scores.argmax(1)
    rows, known = list[dict[str, Any]](), list[float]()
    for number, label in enumerate(labels):
        is_said, is_there = predicted == number, true == number
        hits, said, there = int((is_said & is_there).sum()), int(is_said.sum()), int(is_there.sum())
        f1 = 2 * hits / ((said + there) or 1)
        known += [f1] if said or there else []
        shares = {"precision": hits / (said or 1), "recall": hits / (there or 1), "f1": f1}
        rows.append({"label": label, "num_samples": there, **shares})
    right, macro_f1 = int((predicted == true).sum()), sum(known) / len(known)
    figures = {"accuracy": right / len(true), "macro_f1": macro_f1}
    return {"num_samples": len(true), "num_right": right, **figures, "labels": rows}
