"""What the plan knows of the tower: its FLOPs beside those that torch counts, and ranks balanced by both parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures need Pillow")

from picture_families import SOME_FAMILIES
from picture_world import PictureWorld, draw

from flatout.data.tokenizer import load_tokenizer
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.decide import plan_run
from flatout.trainer.model_shape import make_shape


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> PictureWorld:
    return PictureWorld(tmp_path_factory.mktemp("towers"))


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_flops_are_those_that_torch_counts(world: PictureWorld, family: str) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageTextToText

    from flatout.data.pictures.processor import PictureProcessor
    from flatout.data.pictures.read import decoded
    from flatout.models.blocks import image_features
    from flatout.models.packed import flatten_samples
    from flatout.models.pictures import PicturePacker

    folder = str(world.model(family))
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    processor, image = PictureProcessor(folder, load_tokenizer(folder)), decoded(draw(48, 64))
    standing, ids = processor.standing(48, 64), processor.tokens_of(48, 64)
    batch = flatten_samples([(ids, np.zeros(len(ids), bool))])
    pictures = PicturePacker(processor, model).with_images(batch, [image], [1], [ids]).pictures
    assert pictures is not None
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        image_features(model, pictures)
    tower = make_shape(json.loads(Path(folder, "config.json").read_text())).tower
    assert tower is not None
    planned = float(tower.flops(standing.num_values, standing.num_tokens))
    assert planned == pytest.approx(counted.get_total_flops(), rel=0.15)


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_ranks_are_balanced_by_tower_and_decoder(world: PictureWorld, tmp_path: Path, layout: str) -> None:
    """Samples of one length, of which a few have a picture: one for each rank, not two for one."""
    batch = {"samples_per_step": 8, "micro_batch_tokens": 1000 if layout == "packed" else 100, "layout": layout}
    config = world.config("qwen2_5_vl", tmp_path / "run", batch=batch)
    planned = plan_run(config, Reporter(), Rank(0, 2))
    samples = planned.plan.samples
    assert samples.tower_flops is not None
    assert ((samples.tower_flops > 0) == (np.diff(planned.store.picture_offsets) > 0)).all()

    def spread(plan: Any) -> float:
        """Return how much more the busier rank computes, over all steps."""
        found = []
        for step in plan.steps():
            costs = dict(zip(range(len(samples)), (item.cost for item in samples.items(plan.layout.cost)), strict=True))
            sums = [sum(costs[i] for batch in rank for i in batch.sample_ids) for rank in step.ranks]
            found.append(max(sums) / (sum(sums) / len(sums)))
        return float(np.mean(found))

    blind = replace(planned.plan, samples=replace(samples, tower_flops=None))
    assert spread(planned.plan) < spread(blind)
    step = next(iter(planned.plan.steps()))
    places = samples.indices_of(step.sample_ids)
    assert planned.plan.flops(step) - blind.flops(step) == pytest.approx(samples.tower_flops[places].sum())
