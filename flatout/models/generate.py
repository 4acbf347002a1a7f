"""Answers from a chat model, with transformers' own generation: its attention, its cache, its sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from flatout.errors import UsageError
from flatout.models.device_map import input_device


class _CallbackStreamer(TextStreamer):  # type: ignore[misc]  # transformers is untyped to mypy, so its classes are Any
    """Hands every finished piece of text to a function."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The assistant's next turn after `messages` (dicts with role and content), rendered by the tokenizer's template.

    `temperature` 0 is greedy; else sampling by `seed`, with the model's own top-k and top-p, leaving the global random
    state alone. `on_text` gets the text piece by piece as it comes. The model must come from load_for_inference.
    Raises UsageError when the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template; use the one saved in the run's final/ folder")
    device = input_device(model)
    inputs = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(device)
    stop_ids = stop_token_ids(model, tokenizer)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stop_ids), 0),
            streamer=None if on_text is None else _CallbackStreamer(tokenizer, on_text),
            **sampling,
        )
    new_tokens = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new_tokens, skip_special_tokens=True)).strip()


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the model's, the tokenizer's, and the one its chat template puts behind a turn."""
    stops: set[int] = set()
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops.update([configured] if isinstance(configured, int) else configured or [])
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "flatout"}]
    behind = str(tokenizer.apply_chat_template(turn, tokenize=False)).rpartition("flatout")[2]
    first = tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
    if first and first[0] in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder):
        stops.add(int(first[0]))
    return sorted(stops)
