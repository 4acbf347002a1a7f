"""docs/models.md is what its script writes, and the script still measures models as it says."""

from __future__ import annotations

import json

import pytest
from model_table import PAGE, RESULTS, measure, page


def test_the_page_is_written_from_the_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


@pytest.mark.parametrize(("model_type", "layout"), [("qwen3", "packed"), ("gpt_neo", "rows"), ("jamba", "rows")])
def test_a_row_is_exact(model_type: str, layout: str) -> None:
    row = measure(model_type)
    assert row["counts"]
    assert "refused" not in row
    assert row["layout"] == layout == json.loads(RESULTS.read_text())["models"][model_type]["layout"]
    assert row["gradient_error"] < 1e-6
    assert row["targets"]


def test_an_encoder_decoder_does_not_count() -> None:
    assert measure("pix2struct") == {"counts": False, "reason": "an encoder-decoder"}
