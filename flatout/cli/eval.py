"""`flatout eval`: scores a run, an adapter or a model on lm-eval's tasks, own questions, and pairs or labels."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.screen import import_transformers, model_target, progress_console
from flatout.errors import DataError, Fix, UsageError
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import encode_json, now_utc
from flatout.io.no_gpu import no_gpu_error
from flatout.io.own_output import write_output
from flatout.io.redact import redacted

if TYPE_CHECKING:
    from flatout.eval.tasks import Tasks
    from flatout.models.load.inference import ModelPaths

MAX_ANSWERS_BYTES = 64 << 20
BATCH_SIZE, MAX_NEW_TOKENS = 8, 256
# settings of a run's data that decide what a row's tokens are
_OF_ROWS = {"max_tokens", "too_long", "template", "template_args", "special_tokens", "lost_reasoning", "end_of_turn"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("target", type=model_target, metavar="RUN_OR_ADAPTER_OR_MODEL", help="run, adapter or model folder, or hub id")
    add("--tasks", help="tasks of lm-eval, such as arc_easy,hellaswag (needs the extra `eval`)")
    add("--include-path", type=Path, metavar="FOLDER", help="folder of further lm-eval tasks; their files can run code")
    add("--chat", action="store_true", help="apply the chat template to the tasks' questions")
    add("--batch-size", type=int, metavar="N", help=f"batch size of lm-eval ({BATCH_SIZE})")
    answers = "JSONL with prompt or messages, and answer (a text, or a list of accepted ones): exact match, without "
    add("--answers", type=Path, metavar="FILE", help=answers + "the space around answers")
    add("--rows", type=Path, metavar="FILE", help="for a model that scores (objective reward or classify): pairs, or "
        "texts with labels, in any format of data: how often it is right")  # fmt: skip
    add("--ignore-case", action="store_true", help="with --answers: ignore upper and lower case")
    length = f"with --answers: maximum answer length in tokens ({MAX_NEW_TOKENS})"
    add("--max-new-tokens", type=int, metavar="N", help=length)
    add("--limit", type=int, metavar="N", help="use only the first N samples of each task or file")
    add("--merged", action="store_true", help="merge the adapter into the base weights first, as flatout merge does")
    add("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if available")
    add("--out", type=Path, metavar="FILE", help="JSON file of the results (RUN/eval/NAME.json)")


def run(args: argparse.Namespace) -> int:
    """Score and print. Raises UsageError, DataError for the file of answers, ResourceError for a missing GPU."""
    tasks = [name.strip() for name in (args.tasks or "").split(",") if name.strip()]
    _check(args, tasks)
    from flatout.data.prompt_file import read_prompts

    prompts = [] if args.answers is None else read_prompts(args.answers, max_bytes=MAX_ANSWERS_BYTES)[: args.limit]
    if unanswered := [index for index, prompt in enumerate(prompts, start=1) if not prompt.accepted]:
        raise DataError(f"{args.answers}: prompt {unanswered[0]} has no answer to compare with; add `answer`")
    import_transformers()
    import torch

    from flatout.eval.tasks import open_tasks
    from flatout.models.export import merge
    from flatout.models.load.inference import load_trained, resolve_model_paths

    if args.device == "cuda" and not torch.cuda.is_available():
        raise no_gpu_error("--device cuda")
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    trained = resolve_model_paths(args.target, base=args.base)
    if args.merged and trained.adapter is None:
        raise UsageError(f"--merged: {args.target} has no adapter to merge; leave it out")
    with progress_console() as console:
        console.on_phase("reading tasks")
        opened = open_tasks(tasks, args.include_path) if tasks else None
        console.on_phase(f"loading {trained.base}")
        model, tokenizer = load_trained(trained, device=device, writes=args.rows is None)
        num_merged = merge(model) if args.merged else 0
    if (args.chat or prompts) and not tokenizer.chat_template:
        option = "--chat" if args.chat else "--answers"
        raise UsageError(f"{option}: the tokenizer has no chat template; use the one saved in the run's final/ folder")
    adapter = None if trained.adapter is None else str(trained.adapter)
    facts = {"model": redacted(trained.base), "adapter": adapter, "merged": bool(num_merged), "limit": args.limit}
    if args.rows is not None:
        _score_rows(args, model, trained, facts)
    if opened:
        _score_tasks(args, model, tokenizer, opened, facts)
    if prompts:
        name = args.answers.stem
        # a file of questions may have the name of a task
        name = f"answers-{name}" if tasks and _safe(name) == _safe("-".join(tasks)) else name
        _score_answers(args, model, tokenizer, prompts, facts, name)
    return 0


def _score_tasks(args: argparse.Namespace, model: Any, tokenizer: Any, tasks: Tasks, facts: dict[str, Any]) -> None:
    """Score lm-eval's tasks, print them and write the results."""
    from rich.console import Console

    from flatout.eval.tasks import score_tasks
    from flatout.track.console import ConsoleCallback

    # not the stream that `score_tasks` takes the bars from
    with ConsoleCallback(Console(file=sys.stderr)) as console:
        rows = score_tasks(
            model,
            tokenizer,
            tasks,
            on_phase=console.on_phase,
            limit=args.limit,
            batch_size=args.batch_size or BATCH_SIZE,
            chat=args.chat,
        )
    _print_tasks(rows)
    _write(args, "-".join(tasks.names), {**facts, "chat": args.chat, "tasks": rows})


def _score_answers(
    args: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[Any], facts: dict[str, Any], name: str
) -> None:
    """Compare answers with those that are accepted, print how many are right and write them."""
    from flatout.eval.exact_match import score_answers

    options = {"ignore_case": args.ignore_case, "max_new_tokens": args.max_new_tokens or MAX_NEW_TOKENS}
    with progress_console() as console:
        console.on_phase("reading prompts")
        num_ended = 0

        def report_token(prompt: int, is_last: bool, silent_s: float) -> None:
            nonlocal num_ended
            num_ended += is_last
            console.on_phase("answering prompts", num_ended, len(prompts))

        marked = score_answers(model, tokenizer, prompts, on_token=report_token, **options)
    num_right = sum(row["right"] for row in marked)
    counts = {"num_prompts": len(marked), "num_right": num_right, "exact_match": num_right / len(marked)}
    print(f"exact match: {num_right} of {len(marked)} right ({num_right / len(marked):.1%})")
    _write(args, name, {**facts, **options, **counts, "answers": marked})


def _score_rows(args: argparse.Namespace, model: Any, trained: ModelPaths, facts: dict[str, Any]) -> None:
    """Score pairs, or texts with labels, print how many are right and write it. Rows are read as the run's were."""
    from flatout.config.folders import is_run_folder
    from flatout.config.read import load_config
    from flatout.config.schema import DataConfig
    from flatout.data.build import open_or_build
    from flatout.eval.scores import judge, scores_of
    from flatout.models.load.auto_class import is_scoring

    if not is_scoring(model.config):
        raise UsageError(f"--rows: {args.target} generates text and gives no scores; use --answers or --tasks")
    labels = [str(model.config.id2label[index]) for index in range(model.config.num_labels)]
    file, known, source = Path(args.target) / "config.yaml", dict[str, Any](), dict[str, Any]()
    if is_run_folder(file.parent):
        data = load_config(file).data
        known = data.model_dump(include=_OF_ROWS, exclude_unset=True)
        source = data.sources[0].model_dump(include={"columns", "keys", "roles", "system"}) if data.sources else {}
    form = {"path": str(args.rows), "hub": False, "format": "classify" if len(labels) > 1 else "auto"}
    with progress_console() as console, tempfile.TemporaryDirectory() as root:
        console.on_phase("reading rows")
        given = {"name": "rows", "root": root, "tokenizer": trained.tokenizer, "sources": [{**source, **form}]}
        config = DataConfig.model_validate({**known, **given, "num_samples": args.limit, "shuffle": False})
        store = open_or_build(config, trained.base, log=lambda text: console.on_stage("tokens", text))
        scores = scores_of(model, store, lambda done, total: console.on_phase("scoring rows", done, total))
        judged = judge(scores, store, labels)
    num = judged.get("num_pairs") or judged["num_samples"]
    print(f"accuracy: {judged['num_right']} of {num} right ({judged['accuracy']:.1%})")
    if len(labels) > 1:
        print(f"macro F1: {judged['macro_f1']:.4f}")
    _write(args, args.rows.stem, {**facts, **judged})


def _check(args: argparse.Namespace, tasks: list[str]) -> None:
    if args.rows is not None and (tasks or args.answers is not None):
        raise UsageError("--rows is for a model that scores, --tasks and --answers for one that writes; give one")
    if not tasks and args.answers is None and args.rows is None:
        fix = Fix({"--tasks": "arc_easy"}, "for example")
        raise UsageError("nothing to score: give --tasks, --answers FILE or --rows FILE", [fix])
    for name in ("limit", "batch_size", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            hint = "; leave it out for all samples" if name == "limit" else ""
            raise UsageError(f"{option} is {value}; expected at least 1{hint}")
    if not tasks and (args.include_path or args.chat or args.batch_size):
        raise UsageError("--include-path, --chat and --batch-size have no effect without --tasks")
    if args.answers is None and (args.ignore_case or args.max_new_tokens):
        raise UsageError("--ignore-case and --max-new-tokens have no effect without --answers")
    if tasks and args.answers and args.out:
        raise UsageError("--out is one file, but --tasks and --answers write one each; leave one out")


def _print_tasks(rows: list[dict[str, Any]]) -> None:
    print(f"{'task':<32} {'metric':<20} {'value':>8} {'+-':>8} {'n':>7}")
    for row in rows:
        value, stderr = ("-" if row[name] is None else f"{row[name]:.4f}" for name in ("value", "stderr"))
        name, count = row["task"][:32], row["num_samples"] or "-"
        print(f"{name:<32} {row['metric'][:20]:<20} {value:>8} {stderr:>8} {count:>7}")


def _safe(name: str) -> str:
    """Return a name as that of a file."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]


def _write(args: argparse.Namespace, name: str, content: dict[str, Any]) -> None:
    """Write results to --out, or into the target's folder; those of a hub id are only shown."""
    folder = Path(args.target)
    file = args.out or (folder / "eval" / f"{_safe(name)}.json" if folder.is_dir() else None)
    if file is None:
        print("not written, as the model is a hub id; name a file with --out")
        return
    DurableIO().make_dir(file.parent)
    write_output(file, encode_json({"written_at": now_utc(), **content}), "eval")
    print(f"written to {file}")
