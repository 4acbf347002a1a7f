"""Training what reads pictures, against plain transformers + PEFT, one sample at a time, from the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from picture_families import BY_DEFAULT
from picture_world import FAMILIES, PictureWorld
from plain_pictures import PlainRun, start_adapter
from safetensors.torch import load_file

from flatout.models.blocks import part_of

NUM_STEPS = 10
BOTH = {"freeze_vision_tower": False, "freeze_projector": False}
# families whose projector is a bare matrix, which takes no adapter
NO_LAYER = ("gemma3", "ovis2")
# the family whose tower's memory is not planned
UNPLANNED = "gemma4"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return PictureWorld(tmp_path_factory.mktemp("towers"))


def cases() -> Iterator[Any]:
    for family, own in FAMILIES.items():
        for layout in own.layouts:
            methods = ("lora", "full") if own.limit < 1e-8 else ("lora", "full", "sgd")
            for method in methods if family != UNPLANNED else ():
                first = (family, layout, method) == (BY_DEFAULT[1], "packed", "lora")
                yield pytest.param(family, layout, method, marks=() if first else pytest.mark.exhaustive)


@pytest.mark.parametrize(("family", "layout", "method"), list(cases()))
def test_training_the_tower_equals_a_plain_loop(world, tmp_path, metrics_of, record_property, family, layout, method):
    """`benchmarks/picture_table.py` makes a table of what it records."""
    from flatout.parallel.rank import Rank
    from flatout.track.callback import Reporter
    from flatout.trainer.planned_run import open_and_plan
    from flatout.trainer.run import train

    parts = BOTH if method != "lora" or family not in NO_LAYER else {"freeze_vision_tower": False}
    sections: dict[str, Any] = {"batch": {"layout": layout, "max_steps": NUM_STEPS}, "model": parts}
    if method == "lora":
        config, adapter = world.config(family, tmp_path / "run", **sections), tmp_path / "start"
        planned = start_adapter(config, adapter)
    else:
        optim = {"name": "sgd", "beta1": 0.0} if method == "sgd" else {}
        sections |= {"method": "full", "lora": None, "optim": {"weight_decay": 0.0, **optim}}
        config, adapter = world.config(family, tmp_path / "run", **sections), None
        planned = open_and_plan(config, Reporter(), Rank())
    assert planned.shape.tower.layer_passes == (2 if method == "lora" else 3)  # forward, backward of inputs, of weights
    plain = PlainRun(planned, world.model(family), adapter, world.rows, sgd=method == "sgd")
    losses = plain.losses()
    train(config)
    records = metrics_of(tmp_path / "run")
    assert len(records) == NUM_STEPS
    worst = max(abs(record["loss"] - loss) / loss for record, loss in zip(records, losses, strict=True))
    of_norm = max(abs(record["grad_norm"] / norm - 1) for record, norm in zip(records, plain.grad_norms, strict=True))
    print(f"{family} {layout} {method}: loss {worst:.1e}, norm {of_norm:.1e}")
    for name, value in (("family", family), ("layout", layout), ("method", method), ("difference", worst)):
        record_property(name, value)
    # some norms of decoders compute in fp32, and AdamW's first steps follow the sign of gradients, also of those that
    # are rounding alone
    is_wide = FAMILIES[family].limit < 1e-8
    if method == "sgd":  # whose steps are as near as the gradients
        assert worst < FAMILIES[family].limit
        assert of_norm < 1e-4
    assert records[0]["loss"] == pytest.approx(losses[0], rel=FAMILIES[family].limit)
    assert records[0]["grad_norm"] == pytest.approx(plain.grad_norms[0], rel=1e-8 if is_wide else 1e-4)
    assert worst < (5e-6 if is_wide else 3e-2)
    assert of_norm < (5e-5 if is_wide else 0.3)
    if method == "lora":
        ours, truth = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors"), plain.adapter()
        assert ours.keys() == truth.keys()
        assert {part_of(name) for name in ours} >= {"vision_tower"}
    else:
        ours, truth = load_file(tmp_path / "run" / "final" / "model.safetensors"), plain.model.state_dict()
    for name in ours.keys() & truth.keys() if is_wide or method == "lora" else ():
        torch.testing.assert_close(ours[name].double(), truth[name].double(), rtol=1e-2, atol=1e-3, msg=name)


def test_a_tower_that_is_not_planned_is_not_trained(world, tmp_path):
    from flatout.errors import UsageError
    from flatout.parallel.rank import Rank
    from flatout.track.callback import Reporter
    from flatout.trainer.planned_run import open_and_plan

    for model in ({}, BOTH):
        config = world.config(UNPLANNED, tmp_path / "run", batch={"layout": "rows"}, model=model)
        if not model:
            assert open_and_plan(config, Reporter(), Rank()).store.num_pictures
            continue
        with pytest.raises(UsageError, match="the vision tower of model type gemma4_text cannot be planned"):
            open_and_plan(config, Reporter(), Rank())


GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    ("device", "family"),
    [
        pytest.param("cpu", "qwen3_vl", marks=pytest.mark.exhaustive),
        *(pytest.param("cuda", family, marks=GPU) for family in ("qwen2_5_vl", "qwen3_vl", "llava_onevision")),
    ],
)
def test_steps_in_bf16_follow_plain_ones(tmp_path, metrics_of, device, family):
    """On a GPU, the tower's gradients come through its own attention kernel where the family takes it."""
    from flatout.trainer.run import train

    torch.compiler.reset()
    wide = PictureWorld(tmp_path / "wide", wide=True)
    planned = start_adapter(wide.config(family, tmp_path / "exact", model=BOTH), tmp_path / "start")
    plain = PlainRun(planned, wide.model(family), tmp_path / "start", wide.rows)
    losses = plain.losses()
    train(wide.config(family, tmp_path / "run", device=device, model={**BOTH, "precision": "bf16"}))
    records = metrics_of(tmp_path / "run")
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=2e-2)
    assert records[0]["grad_norm"] == pytest.approx(plain.grad_norms[0], rel=3e-2)
