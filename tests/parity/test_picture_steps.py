"""Pictures against plain transformers + PEFT, one sample at a time, from the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from picture_world import FAMILIES, NUM_STEPS, PictureWorld
from plain_pictures import PlainRun, start_adapter
from safetensors.torch import load_file

# positions on three axes, plain ones, and pictures that are read both ways, in rows
WITH_THE_SUITE = ("qwen2_5_vl", "llava_onevision", "gemma4")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return PictureWorld(tmp_path_factory.mktemp("pictures"))


def cases() -> Iterator[Any]:
    """One layout of some families by default."""
    for family, own in FAMILIES.items():
        for layout in own.layouts:
            first = layout == own.layouts[0] and family in WITH_THE_SUITE
            yield pytest.param(family, layout, marks=() if first else pytest.mark.exhaustive)


@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_training_equals_a_plain_loop(world, tmp_path, metrics_of, record_property, family, layout):
    """`benchmarks/picture_table.py` makes a table of what it records."""
    from flatout.trainer.run import train

    config = world.config(family, tmp_path / "run", batch={"layout": layout})
    planned = start_adapter(config, tmp_path / "start")
    assert (planned.plan.batch_layout.name, planned.store.num_pictures) == (layout, 24)
    plain = PlainRun(planned, world.model(family), tmp_path / "start", world.rows)
    expected = plain.losses()
    train(config)
    got = [record["loss"] for record in metrics_of(tmp_path / "run")]
    assert len(got) == NUM_STEPS
    worst = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
    assert worst < FAMILIES[family].limit, f"worst relative difference {worst:.2e}"
    ours, theirs = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors"), plain.adapter()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), rtol=1e-4, atol=1e-5, msg=name)
    for name, value in (("family", family), ("layout", layout), ("difference", worst)):
        record_property(name, value)
