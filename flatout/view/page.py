"""Fills the templates of pages. Every text in them is escaped, and a page loads nothing."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# control, bidirectional and other invisible characters, which a reader must see
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]")  # fmt: skip  # noqa: E501
# longer texts of records are cut in a page
MAX_TEXT = 20_000


def page(title: str, body: str) -> str:
    """Return a whole page around `body`, which is HTML. The page may load nothing."""
    return render("page.html", title=title, body=body)


def render(name: str, **facts: Any) -> str:
    """Return a template of `assets` as HTML. Texts are escaped, as `text` does it; only `|safe` passes HTML on."""
    return _templates().get_template(name).render(facts)


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("flatout.view", "assets"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(text(value)),
    )
    templates.filters["visible"] = lambda value: Markup(visible(value))
    return templates


def text(value: object, *, mark: str = "{}") -> str:
    """Return plain text for HTML and its attributes; invisible characters become their code point, within `mark`."""
    shown = str(value)
    if len(shown) > MAX_TEXT:
        shown = f"{shown[:MAX_TEXT]} ... ({len(shown):,} characters)"
    return marked(escape(shown), mark)


def marked(shown: str, mark: str = "{}") -> str:
    """Return a text with the code point of each invisible character in its place, within `mark`."""
    return _HIDDEN.sub(lambda match: mark.format(f"U+{ord(match[0]):04X}"), shown)


def visible(value: str) -> str:
    """Return text for HTML with each invisible character marked."""
    return text(value, mark="<s>{}</s>")
