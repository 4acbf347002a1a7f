"""The demo with pictures: what is drawn, what an untrained model answers, and that the whole demo learns."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures need Pillow")

from PIL import Image

from flatout.cli.main import main
from flatout.demo import shapes


def test_pictures_show_what_the_answers_say():
    for one in shapes.sample_shapes(200, 3, held_out=False):
        pixels = np.asarray(Image.open(io.BytesIO(one.content))).astype(int)
        is_shape = np.abs(pixels - pixels[0, 0]).sum(-1) > 0
        inside = pixels[is_shape]
        color = min(shapes.COLORS, key=lambda name: np.abs(inside.mean(0) - shapes.COLORS[name]).sum())
        rows, columns = np.flatnonzero(is_shape.any(1)), np.flatnonzero(is_shape.any(0))
        share = is_shape.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
        shape = "square" if share > 0.95 else "circle" if share > 0.65 else "triangle"
        assert one.answer == shapes.ANSWERS[one.question].format(color=color, shape=shape)


def test_no_held_out_picture_is_trained_on():
    trained = {one.content for one in shapes.sample_shapes(1000, 3, held_out=False)}
    held_out = [one.content for one in shapes.sample_shapes(200, 3, held_out=True)]
    assert trained.isdisjoint(held_out)
    assert held_out == [one.content for one in shapes.sample_shapes(200, 3, held_out=True)]


def test_an_untrained_model_fails_the_demo_and_says_so(tmp_path, monkeypatch, capsys):
    whole = shapes.shapes_config

    def short(folder: Path, seed: int) -> shapes.Config:
        config = whole(folder, seed)
        return config.model_copy(update={"batch": config.batch.model_copy(update={"max_steps": 3})})

    monkeypatch.setattr(shapes, "shapes_config", short)
    monkeypatch.setattr(shapes, "NUM_TRAIN", 120)
    monkeypatch.setattr(shapes, "NUM_HELD_OUT", 20)
    assert main(["demo", "--images", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "of 20 answered correctly" in out
    assert "(expected 95%)" in out
    assert f"flatout chat {tmp_path / 'run'} --image {tmp_path / 'pictures'}/000.png --prompt" in out
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert all((tmp_path / path).is_file() for row in rows for path in row["images"])
    assert main(["demo", "--images", "--out", str(tmp_path), "--seed", "43"]) == 2


@pytest.mark.exhaustive
def test_the_demo_learns_to_answer_about_pictures(tmp_path, capsys):
    assert main(["demo", "--images", "--out", str(tmp_path)]) == 0
    assert "of 200 answered correctly" in capsys.readouterr().out
