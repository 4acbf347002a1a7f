"""`flatout eval`: scores a run, an adapter or a model on lm-eval's tasks, own questions, and pairs or labels."""

from __future__ import annotations

import argparse
from pathlib import Path

from flatout.cli.parser import COUNT
from flatout.cli.screen import import_transformers, progress_console
from flatout.errors import DataError, Fix, UsageError
from flatout.view.open_runs import find_model

MAX_ANSWERS_BYTES = 64 << 20
BATCH_SIZE, MAX_NEW_TOKENS = 8, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("target", type=find_model, metavar="RUN_OR_ADAPTER_OR_MODEL", help="run, adapter or model folder, or hub id")
    add("--tasks", help="tasks of lm-eval, such as arc_easy,hellaswag (needs the extra `eval`)")
    add("--include-path", type=Path, metavar="FOLDER", help="folder of further lm-eval tasks; their files can run code")
    add("--chat", action="store_true", help="apply the chat template to the tasks' questions")
    add("--batch-size", type=COUNT, metavar="N", help=f"batch size of lm-eval ({BATCH_SIZE})")
    answers = "JSONL with prompt or messages, and answer (a text, or a list of accepted ones): exact match, without "
    add("--answers", type=Path, metavar="FILE", help=answers + "the space around answers")
    add("--rows", type=Path, metavar="FILE", help="for a model that scores (objective reward or classify): pairs, or "
        "texts with labels, in any format of data: how often it is right")  # fmt: skip
    add("--ignore-case", action="store_true", help="with --answers: ignore upper and lower case")
    length = f"with --answers: maximum answer length in tokens ({MAX_NEW_TOKENS})"
    add("--max-new-tokens", type=COUNT, metavar="N", help=length)
    add("--limit", type=COUNT, metavar="N", help="use only the first N samples of each task or file")
    add("--merged", action="store_true", help="merge the adapter into the base weights first, as flatout merge does")
    add("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if available")
    add("--out", type=Path, metavar="FILE", help="JSON file of the results (RUN/eval/NAME.json)")


def run(args: argparse.Namespace) -> None:
    """Score and print. Raises UsageError, DataError for the file of answers, ResourceError for a missing GPU."""
    tasks = [name.strip() for name in (args.tasks or "").split(",") if name.strip()]
    _check(args, tasks)
    from flatout.data.prompt_file import read_prompts

    prompts = [] if args.answers is None else read_prompts(args.answers, max_bytes=MAX_ANSWERS_BYTES)[: args.limit]
    if unanswered := [index for index, prompt in enumerate(prompts, start=1) if not prompt.accepted]:
        raise DataError(f"{args.answers}: prompt {unanswered[0]} has no answer to compare with; add `answer`")
    import_transformers()
    from flatout.eval.run import load, safe_name, task_file
    from flatout.eval.tasks import open_tasks
    from flatout.models.load.inference import resolve_model_paths

    paths = resolve_model_paths(args.target, base=args.base)
    with progress_console() as console:
        console.on_phase("reading tasks")
        opened = open_tasks(tasks, args.include_path) if tasks else None
    evaluation = load(
        args.target, paths, device=args.device, merged=args.merged, writes=args.rows is None, limit=args.limit,
        out=args.out,
    )  # fmt: skip
    if (args.chat or prompts) and not evaluation.tokenizer.chat_template:
        option = "--chat" if args.chat else "--answers"
        raise UsageError(f"{option}: the tokenizer has no chat template; use the one saved in the run's final/ folder")
    if args.rows is not None:
        print("\n".join(evaluation.score_rows(args.rows)))
    if opened:
        lines = evaluation.score_tasks(opened, batch_size=args.batch_size or BATCH_SIZE, chat=args.chat)
        print("\n".join(lines))
    if prompts:
        name = args.answers.stem
        # a file of questions may have the name of a task
        name = f"answers-{name}" if tasks and safe_name(name) == safe_name(task_file(tasks)) else name
        length = args.max_new_tokens or MAX_NEW_TOKENS
        lines = evaluation.score_answers(name, prompts, ignore_case=args.ignore_case, max_new_tokens=length)
        print("\n".join(lines))


def _check(args: argparse.Namespace, tasks: list[str]) -> None:
    if args.rows is not None and (tasks or args.answers is not None):
        raise UsageError("--rows is for a model that scores, --tasks and --answers for one that writes; give one")
    if not tasks and args.answers is None and args.rows is None:
        fix = Fix({"--tasks": "arc_easy"}, "for example")
        raise UsageError("nothing to score: give --tasks, --answers FILE or --rows FILE", [fix])
    if not tasks and (args.include_path or args.chat or args.batch_size):
        raise UsageError("--include-path, --chat and --batch-size have no effect without --tasks")
    if args.answers is None and (args.ignore_case or args.max_new_tokens):
        raise UsageError("--ignore-case and --max-new-tokens have no effect without --answers")
    if tasks and args.answers and args.out:
        raise UsageError("--out is one file, but --tasks and --answers write one each; leave one out")
