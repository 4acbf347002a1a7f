"""Pictures against plain transformers + PEFT, one sample at a time, from the rows themselves."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from picture_world import FAMILIES, make_picture_model, write_rows
from safetensors.torch import load_file

NUM_STEPS, PER_STEP, LR = 4, 6, 1e-2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return rows with pictures, and what makes a family's model once."""
    root = tmp_path_factory.mktemp("pictures")
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = make_picture_model(root / family, family)
        return made[family]

    return root, write_rows(root), model


def config_of(world: Any, family: str, run_dir: Path, **sections: Any) -> Any:
    from flatout.config.read import make_config

    root, rows, model = world
    values = {
        "run_dir": str(run_dir),
        "device": "cpu",
        "seed": 3,
        "model": {"name": str(model(family)), "precision": "fp64"},
        "data": {"name": family, "root": str(root / "data"), "sources": [{"path": str(rows)}], "num_procs": 1},
        "lora": {"rank": 4, "alpha": 8},
        "batch": {"samples_per_step": PER_STEP, "micro_batch_tokens": 300, "max_steps": NUM_STEPS},
        "optim": {"lr": LR, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "warmup_steps": 0},
        "checkpoint": {"every_steps": None},
        "eval": {"prompts": []},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return make_config(values, [])


def plain_processor(folder: Path) -> Any:
    """Make the processor by transformers' own classes, without its part for videos."""
    import transformers

    fields = json.loads((folder / "processor_config.json").read_text())
    own = getattr(transformers, fields.pop("processor_class"))
    fields.pop("image_processor")

    class WithoutVideos(own):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return WithoutVideos(image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **fields)


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]}
        for m in messages
    ]


def plain_inputs(processor: Any, row: list[dict[str, Any]], folder: Path) -> dict[str, torch.Tensor]:
    from PIL import Image, ImageOps

    text = processor.tokenizer.apply_chat_template(in_parts(row), tokenize=False)
    paths = [p["path"] for m in row if not isinstance(m["content"], str) for p in m["content"] if p["type"] == "image"]
    images = [
        ImageOps.exif_transpose(Image.open(io.BytesIO((folder / path).read_bytes()))).convert("RGB") for path in paths
    ]
    given = dict(processor(text=[text], images=images or None, return_tensors="pt"))
    given.pop("attention_mask")
    if not images:
        given.pop("mm_token_type_ids", None)
    return given


def plain_losses(model: Any, steps: Any, loss_of: Any) -> Iterator[float]:
    """Take the steps one sample at a time, with AdamW, clipped gradients and a linear schedule; yield their losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / NUM_STEPS)
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for sample_id in step.sample_ids:
            loss = loss_of(sample_id, step.num_label_tokens)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        yield total


@pytest.mark.parametrize("layout", ["packed", "rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_a_plain_loop(world: Any, tmp_path: Path, metrics_of: Any, family: str, layout: str) -> None:
    from transformers import AutoModelForImageTextToText

    from flatout.checkpoint.write import Checkpoints
    from flatout.models.lora.adapter import save_adapter
    from flatout.parallel.rank import Rank
    from flatout.track.callback import Reporter
    from flatout.trainer.build import Setup, build_run
    from flatout.trainer.decide import plan_run
    from flatout.trainer.run import train

    config = config_of(world, family, tmp_path / "run", batch={"layout": layout})
    root, rows, model_of = world
    folder = model_of(family)
    planned = plan_run(config, Reporter(), Rank())
    assert (planned.plan.layout.name, planned.store.num_pictures) == (layout, 24)
    checkpoints = Checkpoints(tmp_path, keep=1, on_event=lambda kind, facts: None)
    start = build_run(Setup(config, planned, checkpoints, Reporter(), Rank()))
    (tmp_path / "start").mkdir()
    save_adapter(start.model, tmp_path / "start", base_name=config.model.name, config=config.lora)
    start.close()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, str(tmp_path / "start"), is_trainable=True).double()
    model.train()
    processor = plain_processor(folder)
    lines = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]

    def loss_of(sample_id: int, num_label_tokens: int) -> torch.Tensor:
        ids, loss_mask = planned.store.sample(sample_id).pair
        given = plain_inputs(processor, lines[int(planned.store.rows[sample_id]) - 1], root)
        assert given["input_ids"][0].tolist() == ids.tolist()  # what stands for pictures is the processor's own
        logits = model(**given, use_cache=False).logits[0, :-1]
        labels = torch.where(torch.from_numpy(loss_mask.copy()), given["input_ids"][0], -100)[1:]
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_label_tokens

    expected = list(plain_losses(model, planned.plan.steps(), loss_of))
    train(config)
    got = [record["loss"] for record in metrics_of(tmp_path / "run")]
    assert len(got) == NUM_STEPS
    worst = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
    # eager attention computes its softmax in fp32
    assert worst < 1e-6, f"worst relative difference {worst:.2e}"
    ours = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(model)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), rtol=1e-4, atol=1e-5, msg=name)
    print(f"{family} {layout}: worst relative difference over {NUM_STEPS} steps {worst:.1e}")
