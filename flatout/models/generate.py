"""Generate answers from a chat model with transformers' own attention, cache and sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from flatout.errors import UsageError
from flatout.io.redact import printable
from flatout.io.template_limits import bounded
from flatout.models.load.model import library_errors
from flatout.models.stops import stop_token_ids


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; None: by the model's generation_config. `temperature` 0 takes the likeliest token."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def options(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return arguments for `generate`. With nothing set, generation_config decides whether to sample."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        own = model.generation_config
        if self.temperature == 0 or not (given or (own is not None and own.do_sample)):
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, **given}

    def describe(self, model: PreTrainedModel) -> str:
        """Return one line with the effective values, including the model's own."""
        options = self.options(model)
        if not options["do_sample"]:
            return "greedy: the most likely token each time"
        values = {name: options.get(name, getattr(model.generation_config, name, None)) for name in asdict(self)}
        return "sampled: " + ", ".join(f"{name} {value:g}" for name, value in values.items() if value is not None)


class _Streamer(TextStreamer):  # type: ignore[misc]  # transformers has no types for it
    """Counts the tokens of an answer, and prints them if `shows`, without control characters."""

    def __init__(self, tokenizer: Any, on_token: Callable[[int, float], None], *, shows: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_token, self._shows, self._num_tokens = on_token, shows, 0
        self._printed_at = time.monotonic()

    def put(self, value: torch.Tensor) -> None:
        is_prompt = self.next_tokens_are_prompt
        if self._shows or is_prompt:
            super().put(value)
        if not is_prompt:
            self._num_tokens += value.numel()
            self._on_token(self._num_tokens, time.monotonic() - self._printed_at)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._shows:
            super().on_finalized_text(printable(text), stream_end)
            self._printed_at = time.monotonic()


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int = 512,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    stream: bool = False,
    on_token: Callable[[int, float], None] = lambda number, silent_s: None,
) -> str:
    """Generate the assistant's next turn after `messages` (dicts with role and content).

    Messages are rendered by the tokenizer's chat template. Tokens are sampled by `sampling`, the model's
    generation_config and `seed`, without changing the global random state. The answer ends where the model's positions
    do. `stream` prints the text as it is generated. `on_token` gets the number of tokens so far, and the seconds since
    text was printed. The model must come from load_for_inference.
    Raises UsageError if the tokenizer has no chat template, the prompt leaves no position for an answer or the model's
    files have unusable values, and TemplateLimitError for a template that never ends.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template; use the one saved in the run's final/ folder")
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        # offloaded embeddings are copied to the first GPU of the device map
        device = torch.device(next(used for used in model.hf_device_map.values() if used not in ("cpu", "disk")))
    with library_errors("the tokenizer or its chat template cannot render the messages"):
        with bounded("the tokenizer's chat template"):
            inputs = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        inputs = inputs.to(device)
    if inputs["input_ids"].numel() == 0:
        raise UsageError("the tokenizer's chat template renders nothing; use the one saved in the run's final/ folder")
    num_tokens = inputs["input_ids"].shape[1]
    # None for a model without a limit
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or None
    if room is not None and num_tokens >= room:
        raise UsageError(
            f"the prompt has {num_tokens:,} tokens, but the model has {room:,} positions for it and its answer; "
            "shorten it"
        )
    with library_errors("the model's generation_config.json or its tokenizer has an invalid value"):
        stop_ids, num_beams = stop_token_ids(model, tokenizer), getattr(model.generation_config, "num_beams", None)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_new_tokens if room is None else min(max_new_tokens, room - num_tokens),
                eos_token_id=stop_ids or None,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stop_ids), 0),
                # transformers counts no tokens of a search over several beams
                streamer=None if (num_beams or 1) > 1 else _Streamer(tokenizer, on_token, shows=stream),
                **sampling.options(model),
            )
    new_tokens = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new_tokens, skip_special_tokens=True)).strip()
