"""From a conversation, with pictures or without, to the tokens after which the assistant answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from flatout.data.pictures.processor import PictureProcessor, processor_files
from flatout.data.templates.template import ChatTemplate, choose_template
from flatout.errors import UsageError
from flatout.io.template_limits import bounded
from flatout.models.load.model import library_errors
from flatout.rollout.sampler import PicturePrompt

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
