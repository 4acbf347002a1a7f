"""`flatout chat`: answers one prompt or holds a conversation, using a run, an adapter or a model."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.screen import import_transformers, progress_console
from flatout.data.conversation import Origin
from flatout.errors import DataError, Fix, UsageError, first_line
from flatout.io.gpu_driver import no_gpu_error
from flatout.io.near_path import did_you_mean
from flatout.io.redact import printable, redacted
from flatout.rollout.sampler import check_options
from flatout.view.open_runs import find_model

if TYPE_CHECKING:
    from flatout.data.prompt_file import Prompt

# after so many seconds without text, a line says how far an answer is
SILENT_S = 4.0
HELP = """/clear        clear the conversation
/system TEXT  start over with this system prompt
/image FILE   attach this image to the next message
/help         list the commands
/exit         end the chat; so do an empty line and Ctrl-D"""


@dataclass
class _Speaker:
    """A model that answers, with its own conversation."""

    name: str
    model: Any
    tokenizer: Any
    sampling: Any
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)

    def start(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []
        self.pictures.clear()

    def hear(self, prompt: Prompt) -> None:
        self.messages += prompt.messages
        self.pictures += prompt.pictures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    several = "run, adapter or model folder, or hub id; several are compared side by side"
    add("targets", nargs="+", type=find_model, metavar="RUN_OR_ADAPTER_OR_MODEL", help=several)
    add("--compare", choices=("base",), help="base: also chat with the first adapter's base model")
    add("--prompt", help="answer this prompt and exit; without it the chat is interactive")
    pictures = "attach this image to the first message, in place of <image> or before the text; repeatable"
    add("--image", action="append", default=[], metavar="FILE", help=pictures)
    add("--system", help="system prompt")
    add("--max-new-tokens", type=int, default=512, help="maximum answer length in tokens (512)")
    add("--temperature", type=float, help="sampling temperature; 0: greedy (the model's generation_config)")
    add("--top-p", type=float, help="nucleus sampling: keep tokens up to this total probability (generation_config)")
    add("--top-k", type=int, help="sample from this many of the most likely tokens (generation_config)")
    add("--seed", type=int, default=0, help="sampling seed (0)")
    add("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if available")
    spread = "spread the model over all GPUs: auto, balanced, sequential, or a JSON file of module names to devices"
    add("--device-map", metavar="MAP", help=spread)


def run(args: argparse.Namespace) -> None:
    """Load the models once, then answer. Raises UsageError, or ResourceError if a requested GPU is missing."""
    _check(args)
    asked = _user_turn(args.prompt or "", args.image)  # read before the model is
    import_transformers()
    speakers = _load(args)
    for speaker in speakers:
        speaker.start(args.system)
    if args.prompt is None:
        _converse(speakers, args)
        return
    for speaker in speakers:
        speaker.hear(asked)
    _answer(speakers, args)


def _check(args: argparse.Namespace) -> None:
    check_options(args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed)
    if args.prompt is not None and any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        raise UsageError("--prompt: it is not valid UTF-8; check the terminal's encoding")
    said = [one for one in args.targets[1:] if "/" not in one and not Path(one).exists()]
    if said and args.prompt is None:
        fix = Fix({"--prompt": " ".join(said)}, "a message")
        raise UsageError(f"{said[0]}: no run or model here has that name", [fix])
    if len(set(args.targets)) < len(args.targets):
        raise UsageError("a model is given twice; give each one once")
    if args.device_map is not None and args.device != "auto":
        raise UsageError(f"--device {args.device} and --device-map {args.device_map} are both given; keep one")


def _user_turn(text: str, images: list[str]) -> Prompt:
    """Return a user turn with the pictures of these files. Raises DataError for one that is no good."""
    from flatout.data.prompt_file import shown_prompt

    for name in images:
        if not Path(name).is_file() and not name.startswith(("http:", "https:", "data:")):
            what = "no such file; give the path of a picture, such as photo.png"
            raise DataError(f"--image {name}: {what}{did_you_mean(name)}")
    return shown_prompt([{"role": "user", "content": text}], {"images": images}, Origin("--image", 0), Path())


def _load(args: argparse.Namespace) -> list[_Speaker]:
    """Load the models; those that have the same base share its weights."""
    import torch

    from flatout.data.templates.template import choose_template
    from flatout.io.template_limits import bounded
    from flatout.models.load.inference import describe_devices, load_trained, resolve_model_paths
    from flatout.rollout.chat import Sampling

    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise no_gpu_error("--device cuda")
    device = torch.device("cuda" if has_gpu and args.device != "cpu" else "cpu")
    all_paths = {target: resolve_model_paths(target, base=args.base) for target in args.targets}
    first = next(iter(all_paths.values()))
    if args.compare:
        if first.adapter is None:
            raise UsageError(f"--compare base: {args.targets[0]} has no adapter; leave it out")
        all_paths["base"] = replace(first, adapter=None)
    sampling, speakers = Sampling(args.temperature, args.top_p, args.top_k, args.seed), list[_Speaker]()
    for target, paths in all_paths.items():
        name = printable(redacted(target))
        print(f"loading {name}", file=sys.stderr)
        sibling = (first, speakers[0].model) if speakers and args.device_map is None else None
        with progress_console() as console:
            console.on_phase(f"loading {name}")
            model, tokenizer = load_trained(paths, device=device, device_map=args.device_map, sibling=sibling)
        if isinstance(tokenizer.chat_template, str):
            with bounded("the model's chat template"):
                choose_template(tokenizer, None, paths.tokenizer)
        if args.device_map is not None:
            print(describe_devices(model), file=sys.stderr)
        speakers.append(_Speaker(name, model, tokenizer, sampling))
    print(f"Answers are {sampling.describe(speakers[0].model)}", file=sys.stderr)
    return speakers


def _converse(speakers: list[_Speaker], args: argparse.Namespace) -> None:
    """Answer what is typed until an empty line, /exit or the end of input."""
    system, waiting = args.system, list[str](args.image)
    print("Type a message. /help lists commands; an empty line or Ctrl-D ends the chat.")
    with suppress(EOFError):
        while (said := input("> ").strip()) and (word := said.split()[0]) not in ("/exit", "/quit"):
            rest = said.removeprefix(word).strip()
            if word in ("/clear", "/system"):
                system = rest if rest and word == "/system" else system
                waiting.clear()
                for speaker in speakers:
                    speaker.start(system)
                print(f"The conversation was cleared. System prompt: {system or 'none'}")
            elif word == "/image" and rest:
                waiting.append(rest)
            elif re.fullmatch(r"/[a-z]*", word):
                print(HELP if word == "/help" else f"There is no command {word}.\n{HELP}")
            else:
                _say(speakers, said, waiting, args)
                waiting.clear()


def _say(speakers: list[_Speaker], said: str, images: list[str], args: argparse.Namespace) -> None:
    """Add a turn with its pictures and answer it.

    One that cannot be answered, such as a conversation that is too long, is taken back.
    """
    before = [(len(speaker.messages), len(speaker.pictures)) for speaker in speakers]
    try:
        prompt = _user_turn(said, images)
        for speaker in speakers:
            speaker.hear(prompt)
        _answer(speakers, args)
    except (DataError, UsageError) as error:
        print(f"error: {printable(redacted(first_line(error)))}\n{HELP}", file=sys.stderr)
        for speaker, (num_messages, num_pictures) in zip(speakers, before, strict=True):
            del speaker.messages[num_messages:], speaker.pictures[num_pictures:]


def _answer(speakers: list[_Speaker], args: argparse.Namespace) -> None:
    """Print each model's answer as it is generated, and add it to that model's conversation."""
    from flatout.rollout.chat import answer

    for speaker in speakers:
        if len(speakers) > 1:
            print(f"[{speaker.name}]", flush=True)
        with progress_console() as console:
            console.on_phase("reading the prompt")
            options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": speaker.sampling}
            options |= {"pictures": speaker.pictures, "on_token": _progress_printer(console, args.max_new_tokens)}
            reply = answer(speaker.model, speaker.tokenizer, speaker.messages, stream=True, **options)
        speaker.messages.append({"role": "assistant", "content": reply})


def _progress_printer(console: Any, most: int) -> Callable[[int, float], None]:
    """Return what tells on stderr how far an answer is while it prints nothing."""
    reported_s = 0.0

    def tell(number: int, silent_s: float) -> None:
        nonlocal reported_s
        console.on_phase("")
        reported_s = min(reported_s, silent_s)  # text was printed meanwhile
        if silent_s - reported_s >= SILENT_S:
            reported_s = silent_s
            print(f"... answering, token {number:,} of at most {most:,}", file=sys.stderr, flush=True)

    return tell
