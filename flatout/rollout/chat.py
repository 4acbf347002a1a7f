"""A conversation, with pictures or without, as tokens, and the answers of a chat model to it as text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, TextStreamer

from flatout.data.pictures.processor import PictureProcessor, processor_files
from flatout.data.templates.template import ChatTemplate, choose_template
from flatout.errors import UsageError
from flatout.io.redact import printable
from flatout.io.template_limits import bounded
from flatout.models.load.model import library_errors
from flatout.models.pictures import PicturePacker
from flatout.models.stops import stop_token_ids
from flatout.rollout.in_process import BackendName, InProcess
from flatout.rollout.sampler import BOUNDS, Completion, PicturePrompt, SamplingParams, pictures_of
from flatout.rollout.sampler_model import make_sampler_model

# what transformers takes if nothing names another number
_TOP_K = 50
# values of generation_config that draw tokens in ways that are not ours, with those that do nothing
_OTHERS = {
    "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_new_tokens": None, "min_length": 0,
    "exponential_decay_length_penalty": None, "guidance_scale": None, "encoder_repetition_penalty": 1.0,
}  # fmt: skip
# which backends of the sampler are exact for a model, for as long as it is there
_KNOWN: WeakKeyDictionary[PreTrainedModel, dict[BackendName, bool]] = WeakKeyDictionary()

_NOT_RENDERED = "the tokenizer or its chat template cannot render the messages"
# of vision-language models, each read once, for as long as the model is there
_TEMPLATES: WeakKeyDictionary[PreTrainedModel, ChatTemplate] = WeakKeyDictionary()
_PROCESSORS: WeakKeyDictionary[PreTrainedModel, PictureProcessor] = WeakKeyDictionary()


def num_positions(model: PreTrainedModel) -> int | None:
    """Return how long a sequence the model takes; None for a model without a limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or None


def prompt_ids(
    model: PreTrainedModel, tokenizer: Any, messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes] = ()
) -> Sequence[int]:
    """Return `messages` (dicts with role and content) as the tokens after which the assistant answers.

    `pictures` are the files of those that the PICTURE characters of contents stand for, in their order. Raises
    UsageError if the tokenizer has no chat template, the model reads no pictures or the prompt leaves no position for
    an answer, DataError for a picture that its processor refuses, and TemplateLimitError for a template that never
    ends.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template; use the one saved in the run's final/ folder")
    is_text = model.config.get_text_config() is model.config
    if is_text and pictures:
        raise UsageError(f"model type {model.config.model_type} reads no pictures; choose a vision-language model")
    with library_errors(_NOT_RENDERED), bounded("the tokenizer's chat template"):
        if is_text or not isinstance(tokenizer.chat_template, str):
            inputs = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
            token_ids = list(inputs["input_ids"])
        else:
            token_ids = _with_pictures(model, tokenizer, messages, pictures)
    if not token_ids:
        raise UsageError("the tokenizer's chat template renders nothing; use the one saved in the run's final/ folder")
    room = num_positions(model)
    if room is not None and len(token_ids) >= room:
        raise UsageError(
            f"the prompt has {len(token_ids):,} tokens, but the model has {room:,} positions for it and its answer; "
            "shorten it"
        )
    return PicturePrompt(token_ids, pictures) if pictures else token_ids


def processor_of_model(model: PreTrainedModel, tokenizer: Any) -> PictureProcessor:
    """Return the image processor that comes with a model's tokenizer, or with the model. Raises UsageError.

    Only pictures need it, and Pillow: do not ask for it to render texts.
    """
    if model not in _PROCESSORS:
        names = [name for name in (tokenizer.name_or_path, model.name_or_path) if name and processor_files(name)]
        if not names:
            where = tokenizer.name_or_path
            raise UsageError(f"{where} has no image processor; copy preprocessor_config.json of the model")
        _PROCESSORS[model] = PictureProcessor(names[0], tokenizer)
    return _PROCESSORS[model]


def _with_pictures(
    model: PreTrainedModel, tokenizer: Any, messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes]
) -> list[int]:
    turns = [dict(message) for message in messages]
    if model not in _TEMPLATES:
        _TEMPLATES[model] = choose_template(tokenizer, None, tokenizer.name_or_path)
    template = _TEMPLATES[model]
    if not pictures:
        text = template.render(turns, generation_prompt=True)
    else:
        text = processor_of_model(model, tokenizer).rendered_prompt(template, turns, pictures)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; None: by the model's generation_config. `temperature` 0 takes the likeliest token."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def effective(self, model: PreTrainedModel) -> dict[str, float]:
        """Return temperature, top_p, top_k, min_p and repetition_penalty, those that have an effect.

        With nothing set, generation_config decides whether to sample; without temperature, it is greedy. Raises
        ValueError for values in generation_config that mean nothing.
        """
        settings = {name: value for name in BOUNDS if (value := getattr(self, name, None)) is not None}
        generation = model.generation_config
        values = {name: getattr(generation, name, None) for name in BOUNDS} | settings
        chosen = {name: value for name, value in values.items() if value is not None}
        for name, value in chosen.items():
            if isinstance(value, bool) or not isinstance(value, Real) or not BOUNDS[name](value):
                raise ValueError(f"{name} is {value!r}")
        penalty = {name: value for name, value in chosen.items() if name == "repetition_penalty" and value != 1}
        if self.temperature == 0 or not (settings or (generation is not None and generation.do_sample)):
            return penalty
        drawn = {"temperature": 1.0, "top_k": _TOP_K} | chosen
        return {name: drawn[name] for name in BOUNDS if name in drawn and name != "repetition_penalty"} | penalty

    def describe(self, model: PreTrainedModel) -> str:
        """Return one line with the effective values, including the model's own."""
        values = self.effective(model)
        listed = [f"{name} {value:g}" for name, value in values.items()]
        if "temperature" in values:
            return "sampled: " + ", ".join(listed)
        return ", ".join(["greedy: the most likely token each time", *listed])


def _params(model: PreTrainedModel, tokenizer: Any, sampling: Sampling, max_new_tokens: int) -> SamplingParams:
    with library_errors("the model's generation_config.json or its tokenizer has an invalid value"):
        drawn: dict[str, Any] = sampling.effective(model)
        drawn["top_k"] = int(drawn.get("top_k", 0)) or None
        others = {name: getattr(model.generation_config, name, None) for name in _OTHERS}
        if ignored := [f"{name}: {value}" for name, value in others.items() if value not in (None, _OTHERS[name])]:
            warnings.warn(f"generation_config.json sets {', '.join(ignored)}, which is not applied", stacklevel=3)
        stops, positions = frozenset(stop_token_ids(model, tokenizer)), num_positions(model)
        return SamplingParams(max_new_tokens, **drawn, seed=sampling.seed, stop_ids=stops, max_positions=positions)


class _Printer(TextStreamer):  # type: ignore[misc]  # transformers has no types for it
    """Prints answers one after the other without control characters, the first that goes on as it is sampled."""

    def __init__(self, tokenizer: Any, num_answers: int) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._waiting = [list[int]() for _ in range(num_answers)]
        self._ended, self._current = set[int](), 0
        self.printed_at = time.monotonic()

    def add(self, index: int, token_id: int, *, is_last: bool) -> None:
        """Print a token of an answer, or keep it until those before it have ended."""
        self._waiting[index].append(token_id)
        self._ended |= {index} if is_last else set()
        while self._current < len(self._waiting):
            for waiting in self._waiting[self._current]:
                self.put(torch.tensor([waiting]))
            self._waiting[self._current].clear()
            if self._current not in self._ended:
                return
            self.end()
            self._current += 1

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)
        self.printed_at = time.monotonic()


def _sampler(model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> InProcess:
    sampler_model = make_sampler_model(model, warnings.warn)
    if any(pictures_of(prompt) for prompt in prompts):
        sampler_model = replace(sampler_model, pictures=PicturePacker(processor_of_model(model, tokenizer), model))
    return InProcess(sampler_model, known=_KNOWN.setdefault(model, {}))


def _text(tokenizer: Any, completion: Completion) -> str:
    return str(tokenizer.decode(completion.token_ids, skip_special_tokens=True)).strip()


@torch.inference_mode()
def sample_all(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Sequence[int]], num_completions: int, *,
    max_new_tokens: int, sampling: Sampling,
) -> list[list[Completion]]:  # fmt: skip
    """Return `num_completions` of each prompt of `prompt_ids` with their texts, sampled together.

    As `answer_all`, but without generation_config's min_p and repetition_penalty.
    """
    params = replace(_params(model, tokenizer, sampling, max_new_tokens), min_p=None, repetition_penalty=1.0)
    completions = _sampler(model, tokenizer, prompts).sample(prompts, num_completions, params)
    return [[replace(one, text=_text(tokenizer, one)) for one in group] for group in completions]


@torch.inference_mode()
def answer_all(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 512,
    sampling: Sampling = Sampling(),
    stream: bool = False,
    on_token: Callable[[int, bool, float], None] = lambda prompt, is_last, silent_s: None,
) -> list[str]:
    """Return an answer to each prompt of `prompt_ids`, sampled together.

    Tokens are drawn by `sampling`, the model's generation_config and the prompt's index, without changing the
    global random state. An answer ends where the model's positions do. `stream` prints answers as they are sampled, one
    after the other. `on_token` gets the prompt's index, whether its answer has ended, and the seconds since text was
    printed. The model must come from load_for_inference. Raises UsageError if the model's files have unusable values.
    """
    params = _params(model, tokenizer, sampling, max_new_tokens)
    sampler = _sampler(model, tokenizer, prompts)
    if stream:
        sampler.prove(prompts)
    printer, counts = _Printer(tokenizer, len(prompts)), [0] * len(prompts)

    def report_token(prompt: int, completion: int, token_id: int) -> None:
        counts[prompt] += 1
        room = max_new_tokens if params.max_positions is None else params.max_positions - len(prompts[prompt])
        is_last = token_id in params.stop_ids or counts[prompt] == min(room, max_new_tokens)
        if stream:
            printer.add(prompt, token_id, is_last=is_last)
        on_token(prompt, is_last, time.monotonic() - printer.printed_at)

    completions = sampler.sample(prompts, 1, params, report_token)
    return [_text(tokenizer, sampled) for (sampled,) in completions]


def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    pictures: Sequence[bytes] = (),
    *,
    on_token: Callable[[int, float], None] = lambda number, silent_s: None,
    **options: Any,
) -> str:
    """Return the assistant's next turn after `messages` (dicts with role and content) with their `pictures`.

    `options` are those of `answer_all`; `on_token` gets the number of tokens so far, and the seconds since text was
    printed. Raises what `prompt_ids` and `answer_all` raise.
    """
    number = 0

    def report_token(prompt: int, is_last: bool, silent_s: float) -> None:
        nonlocal number
        number += 1
        on_token(number, silent_s)

    return answer_all(
        model, tokenizer, [prompt_ids(model, tokenizer, messages, pictures)], on_token=report_token, **options
    )[0]
