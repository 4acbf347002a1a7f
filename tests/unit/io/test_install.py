"""What an error says of a missing package works in this installation: flatout is on no package index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_extra_that_an_error_names_exists() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for path in (ROOT / "flatout").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"install\('([a-z]+)'\)", text)}
    assert {"images", "studio", "remote", "eval", "gguf"} <= named
    assert named <= declared.keys()
