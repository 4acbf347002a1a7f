"""The tokens that end an answer: found once, and written into everything that generates from a trained model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import GenerationConfig, PreTrainedModel

from flatout.errors import CheckpointError
from flatout.io.json_file import read_json
from flatout.io.template_limits import bounded

GENERATION_CONFIG = "generation_config.json"


def stop_token_ids(model: PreTrainedModel, tokenizer: Any, ends: str | Sequence[str] | None = None) -> list[int]:
    """Return the tokens that end an answer, those of `ends` first, then the model's and the tokenizer's.

    `ends` are the texts that end a turn; if None, it is what the tokenizer's chat template writes behind an answer.
    """
    texts = [template_end(tokenizer)] if ends is None else [ends] if isinstance(ends, str) else ends
    token_ids = [end_of_turn_id(tokenizer, text) for text in texts]
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    token_ids += [configured] if isinstance(configured, int) else configured or []
    token_ids.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(int(token_id) for token_id in token_ids if token_id is not None))


def template_end(tokenizer: Any) -> str:
    """Return what the tokenizer's chat template writes behind an answer, from its stop on; empty without a template.

    Of several tokens the last one stops that ends earlier answers, too: the first may stand behind reasoning as well.
    """
    if not isinstance(tokenizer.chat_template, str):
        return ""
    turns = [{"role": "user", "content": "flatask"}, {"role": "assistant", "content": "flatout"}]
    with bounded("the tokenizer's chat template"):
        behind = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition("flatout")[2]
        earlier = str(tokenizer.apply_chat_template(turns * 2, tokenize=False)).partition("flatout")[2]
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    shared = [token for token in tokens if token in behind and token in earlier.partition("flatask")[0]]
    return behind[max(map(behind.rfind, shared), default=0) :]


def end_of_turn_id(tokenizer: Any, end_of_turn: str) -> int | None:
    """Return the control token that `end_of_turn` begins with; None for other text."""
    first = tokenizer(end_of_turn.strip(), add_special_tokens=False)["input_ids"][:1]
    is_token = first and first[0] in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder)
    return int(first[0]) if is_token else None


def give_template(tokenizer: Any, template: str, ends: str | Sequence[str]) -> None:
    """Give a tokenizer the chat template that a model was trained with, and the template's end as its end token.

    The end token changes only where the tokenizer had no template, as a base model's: an own template has the end token
    that its programs expect, and one that writes `eos_token` would write another text.
    """
    is_base, tokenizer.chat_template = tokenizer.chat_template is None, template
    if not is_base or "eos_token" in template or not ends:
        return
    end_id = end_of_turn_id(tokenizer, ends if isinstance(ends, str) else ends[0])
    # not the next turn's marker, at which an answer also stops
    if end_id is not None and end_id == end_of_turn_id(tokenizer, template_end(tokenizer)):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_id)


def set_stops(model: PreTrainedModel, token_ids: Iterable[int]) -> None:
    """Make a model stop at these tokens: by its generation_config, which it may share with another model, and by its
    config, which some servers read instead; one whose class takes a single token gets the first.
    """
    ids = list(token_ids)
    generation = copy.deepcopy(model.generation_config) or GenerationConfig()
    generation.eos_token_id = ids[0] if len(ids) == 1 else ids or None
    model.generation_config = generation
    for config in (model.config, model.config.get_text_config()):
        try:
            config.eos_token_id = generation.eos_token_id
        except StrictDataclassFieldValidationError:
            config.eos_token_id = ids[0]


def saved_stops(folder: Path) -> list[int]:
    """Return the stop tokens that an adapter's folder names, if any. Raises CheckpointError for a damaged file."""
    if not (path := folder / GENERATION_CONFIG).is_file():
        return []
    content = read_json(path)
    stops = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = [stops] if type(stops) is int else stops or []
    if not isinstance(ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id is {stops!r:.100}; expected token ids, such as [2, 7]")
    return ids
