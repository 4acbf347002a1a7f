"""Which of transformers' Auto classes builds a model: one that writes, one that scores, or one that also sees."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)


def auto_class(config: Any) -> Any:
    """Return the Auto class of a config: the checkpoint's own class, so that what is written loads in it again.

    A vision-language checkpoint is built whole, unless transformers only has, or its config names, the text model.
    """
    if is_scoring(config):
        return AutoModelForSequenceClassification
    vision = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    is_named = vision is not None and vision in (getattr(config, "architectures", None) or ())
    has_text = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if vision is not None and (is_named or not has_text) else AutoModelForCausalLM


def is_scoring(config: Any) -> bool:
    """Whether a config is that of a model for sequence classification, which scores texts and writes none."""
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    return name is not None and name in (getattr(config, "architectures", None) or ())
