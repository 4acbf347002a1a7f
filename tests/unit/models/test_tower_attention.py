"""Towers whose layers take boundaries attend as they do one picture after another."""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
import torch
from picture_families import FAMILIES
from picture_world import draw, make_picture_model
from plain_pictures import plain_processor
from usual import usual

from flatout.kernels.attention.tower import TOWER, register_tower

OF_BOUNDARIES = ("qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def features(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model.base_model.get_image_features(**given, return_dict=True).pooler_output
    return torch.cat(list(found)) if isinstance(found, (tuple, list)) else found


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("family", usual(OF_BOUNDARIES, ["qwen2_5_vl", "glm4v"]))
def test_all_pictures_at_once_equal_one_after_another(tmp_path, family, device):
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    folder = make_picture_model(tmp_path / family, family, wide=True)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    processor = plain_processor(folder)
    images = [Image.open(io.BytesIO(draw(*size, seed))) for seed, size in enumerate(((20, 30), (48, 24), (33, 17)))]
    made = processor(text=[processor.image_token * len(images)], images=images, return_tensors="pt")
    names = inspect.signature(model.base_model.get_image_features).parameters
    given = {name: held.to(device) for name, held in made.items() if name in names}
    given["pixel_values"] = given["pixel_values"].to(dtype)
    alone = features(model, given)
    register_tower()
    model.set_attn_implementation({"vision_config": TOWER})
    together = features(model, given)
    assert model.config.vision_config._attn_implementation == TOWER
    off = (together - alone).norm() / alone.norm()
    assert off < (1e-12 if device == "cpu" else 2e-2)
    together.float().square().sum().backward()  # a tower that is trained gets its gradients
    assert FAMILIES[family].config
    tower = [value.grad for name, value in model.named_parameters() if "visual" in name and "qkv.weight" in name]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in tower)
