"""Links between pages lead somewhere, the navigation lists every page, and every page opens with a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that the site and code hosts make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page):
    for target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        # on a picture, the site's colors in which it is shown
        assert not anchor or (anchor in anchors(other) if other.suffix == ".md" else anchor.startswith("only-")), target


def test_the_navigation_lists_every_page_once():
    def names(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [name for value in (entry.values() if isinstance(entry, dict) else entry) for name in names(value)]

    listed = names(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_opens_with_a_sentence_not_with_a_table_or_a_command(page):
    title, first, *_ = [line for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert re.match(r"# \S", title)
    assert re.match(r"[A-Za-z`*]", first), first
    assert re.search(r"[.:?]( |$)", first), first
