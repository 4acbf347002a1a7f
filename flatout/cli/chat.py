"""`flatout chat`: answers one prompt or holds a conversation, using a run, an adapter or a model."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import suppress
from typing import Any

from flatout.cli.screen import quiet_transformers
from flatout.errors import ResourceError, UsageError

MAX_NEW_TOKENS = 1 << 20
# logits are divided by the temperature; below this, they overflow the range of fp16, then of fp32
MIN_TEMPERATURE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("target", metavar="RUN_OR_ADAPTER_OR_MODEL", help="run, adapter or model folder, or hub id")
    add("--prompt", help="answer this prompt and exit; without it the chat is interactive")
    add("--system", help="system prompt")
    add("--max-new-tokens", type=int, default=512, help="maximum answer length in tokens (512)")
    add("--temperature", type=float, help="sampling temperature; 0: greedy (the model's generation_config)")
    add("--top-p", type=float, help="nucleus sampling: keep tokens up to this total probability (generation_config)")
    add("--top-k", type=int, help="sample from this many of the likeliest tokens (generation_config)")
    add("--seed", type=int, default=0, help="sampling seed (0)")
    add("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if available")
    spread = "spread the model over all GPUs: auto, balanced, sequential, or a JSON file of module names to devices"
    add("--device-map", metavar="MAP", help=spread)


def run(args: argparse.Namespace) -> int:
    """Load the model once, then answer. Raises UsageError, or ResourceError if a requested GPU is missing."""
    _check(args)
    import torch

    from flatout.data.templates.template import choose_template
    from flatout.io.template_limits import bounded
    from flatout.models.generate import Sampling, answer
    from flatout.models.load.inference import describe_devices, load_trained, resolve_model_paths

    quiet_transformers()
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise ResourceError("--device: this machine has no CUDA GPU; use --device cpu")
    device = torch.device("cuda" if has_gpu and args.device != "cpu" else "cpu")
    trained = resolve_model_paths(args.target, base=args.base)
    model, tokenizer = load_trained(trained, device=device, device_map=args.device_map)
    if isinstance(tokenizer.chat_template, str):
        with bounded("the model's chat template"):
            choose_template(tokenizer, None, trained.tokenizer)
    if args.device_map is not None:
        print(describe_devices(model), file=sys.stderr)
    sampling = Sampling(args.temperature, args.top_p, args.top_k)
    print(f"Answers are {sampling.describe(model)}", file=sys.stderr)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    options: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling,
        "seed": args.seed,
        "stream": True,
    }
    if args.prompt is not None:
        answer(model, tokenizer, [*messages, {"role": "user", "content": args.prompt}], **options)
        return 0
    print("Type a message; an empty line or Ctrl-D ends the chat.")
    with suppress(EOFError):
        while prompt := input("> ").strip():
            messages.append({"role": "user", "content": prompt})
            reply = answer(model, tokenizer, messages, **options)
            messages.append({"role": "assistant", "content": reply})
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.max_new_tokens <= MAX_NEW_TOKENS:
        raise UsageError(f"--max-new-tokens is {args.max_new_tokens:,}; expected 1 to {MAX_NEW_TOKENS:,}")
    if args.temperature is not None and args.temperature != 0 and not MIN_TEMPERATURE <= args.temperature < math.inf:
        raise UsageError(f"--temperature is {args.temperature:g}; expected 0 (greedy), or at least {MIN_TEMPERATURE:g}")
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed is {args.seed}; expected 0 to 2**63 - 1")
    if args.prompt is not None and any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        raise UsageError("--prompt: it is not valid UTF-8; check the terminal's encoding")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UsageError(f"--top-p is {args.top_p:g}; expected more than 0, at most 1")
    if args.top_k is not None and args.top_k < 1:
        raise UsageError(f"--top-k is {args.top_k}; expected at least 1")
    if args.device_map is not None and args.device != "auto":
        raise UsageError(f"--device {args.device} and --device-map {args.device_map} are both given; keep one")
