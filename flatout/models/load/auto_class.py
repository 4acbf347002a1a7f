"""Which of transformers' Auto classes builds a model: its text alone, or all of a vision-language model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from flatout.models.blocks import text_decoder


def auto_class(config: Any) -> Any:
    """Return the Auto class of a config: the checkpoint's own class, so that what is written loads in it again.

    A vision-language checkpoint is built whole, unless transformers only has, or its config names, the text model.
    """
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    is_whole = whole is not None and whole in (getattr(config, "architectures", None) or ())
    has_text = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if whole is not None and (is_whole or not has_text) else AutoModelForCausalLM


def towers(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters that text never uses, such as a vision tower's, by name. Raises like `layer_list`."""
    head = model.get_output_embeddings()
    used = {*text_decoder(model).parameters(), *(head.parameters() if head is not None else ())}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in used}
