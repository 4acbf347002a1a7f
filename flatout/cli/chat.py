"""`flatout chat`: answers from a run, an adapter or a model, one prompt or a conversation."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flatout.errors import ResourceError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("target", metavar="RUN_OR_ADAPTER_OR_MODEL", help="run, adapter or model folder, or hub id")
    parser.add_argument("--prompt", help="answer this once and leave; without it the chat is interactive")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer in tokens (512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token each time (0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument("--base", help="base model (folder or hub id) instead of the one the adapter names")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument(
        "--device-map", metavar="MAP",
        help="spread the model over all GPUs: auto, balanced, sequential, or a JSON file of module names to devices",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Load once, then answer. Raises ResourceError when a GPU was asked for and there is none."""
    import torch

    from flatout.cli.quiet import quiet_transformers
    from flatout.models.device_map import describe_devices
    from flatout.models.trained import find_trained, load_trained

    quiet_transformers()
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise ResourceError("--device: this machine has no CUDA GPU; use --device cpu")
    device = torch.device("cuda" if has_gpu and args.device != "cpu" else "cpu")
    if args.device_map is not None and args.device != "auto":
        raise UsageError(f"--device {args.device} and --device-map {args.device_map} are both given; keep one")
    trained = find_trained(args.target, base=args.base)
    model, tokenizer = load_trained(trained, device=device, device_map=args.device_map)
    if args.device_map is not None:
        print(describe_devices(model), file=sys.stderr)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    if args.prompt is not None:
        _turn(model, tokenizer, messages, args.prompt, args)
        return 0
    print("Type a message; an empty line or Ctrl-D ends the chat.")
    while prompt := _read_line():
        _turn(model, tokenizer, messages, prompt, args)
    return 0


def _turn(model: Any, tokenizer: Any, messages: list[dict[str, str]], prompt: str, args: argparse.Namespace) -> None:
    from flatout.models.generate import answer

    messages.append({"role": "user", "content": prompt})
    reply = answer(
        model, tokenizer, messages,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed,
        on_text=lambda piece: print(piece, end="", flush=True),
    )  # fmt: skip
    print()
    messages.append({"role": "assistant", "content": reply})


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
