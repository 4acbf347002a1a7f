"""The frame of a page: title, styles, script, light and dark; tables, cards and escaped text. Nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

# control, bidirectional and other invisible characters, which a reader must see
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]")  # fmt: skip  # noqa: E501
# longer texts of records are cut in a page
MAX_TEXT = 20_000


def page(title: str, body: str) -> str:
    """Return a whole page around `body`, which is HTML. The page may load nothing."""
    assets = resources.files("flatout.view") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en" data-axis="step" data-scale="linear"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head>\n<body>"
        '<button id="theme" type="button" data-toggle="theme" title="Light or dark">'
        '<span class="sun">☀</span><span class="moon">☾</span></button>'
        f"<main>{body}</main>\n<script>{script}</script></body></html>\n"
    )


def text(value: object, *, mark: str = "{}") -> str:
    """Return plain text for HTML and its attributes; invisible characters become their code point, within `mark`."""
    shown = str(value)
    if len(shown) > MAX_TEXT:
        shown = f"{shown[:MAX_TEXT]} ... ({len(shown):,} characters)"
    return _HIDDEN.sub(lambda found: mark.format(f"U+{ord(found[0]):04X}"), escape(shown))


def visible(value: str) -> str:
    """Return text for HTML with each invisible character marked."""
    return text(value, mark="<s>{}</s>")


def section(anchor: str, title: str, body: str, note: str = "") -> str:
    """Return a titled part of a page; nothing for an empty body. `note` and `body` are HTML."""
    note = f'<p class="note">{note}</p>' if note else ""
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{note}{body}</section>' if body else ""


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return headline figures: (name, value, note) each."""
    return "".join(
        f'<div class="card"><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class="note">{text(note)}</dd></div>'
        for name, value, note in figures
    ).join(('<dl class="cards">', "</dl>"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, style: str = "") -> str:
    """Return a table; its cells are plain text, and the first column names the row."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return (
        f'<div class="scroll"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
