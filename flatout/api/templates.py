"""Chat templates: flatout's own by name, those of tokenizers, and texts of Jinja.

TEMPLATES   the names that data.template takes, besides .jinja files
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.data.loss_mask.mask import Masker
from flatout.data.templates.template import OURS as TEMPLATES
from flatout.data.templates.template import ChatTemplate, choose_template
from flatout.data.templates.template import template_text as _template_text

__all__ = ["TEMPLATES", "end_of_turn", "render", "template_text"]


def template_text(tokenizer: Any, template: str | None = None) -> str:
    """Return the Jinja of a template: a name, a .jinja file, or None for the tokenizer's own. Raises DataError."""
    return _template_text(tokenizer, template, tokenizer.name_or_path)[1]


def end_of_turn(tokenizer: Any, text: str, name: str) -> str:
    """Return what this Jinja writes behind an answer, such as <|im_end|>; "" if that is nothing.

    Raises DataError, which calls the template `name`, if it cannot render a turn.
    """
    return Masker(ChatTemplate.checked(name, text, tokenizer)).end_of_turn()


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None = None) -> str:
    """Return a conversation as the text that is tokenized. Raises DataError for one that the template cannot render."""
    return choose_template(tokenizer, template, tokenizer.name_or_path).render([dict(one) for one in messages])
