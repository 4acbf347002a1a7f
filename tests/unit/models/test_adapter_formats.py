"""Adapters in formats that are not read are named, with what to do; PEFT's own is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
from transformers import AutoModelForCausalLM

from flatout.cli.main import main


@pytest.fixture
def adapter(tiny, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def merge(adapter: Path, out: Path, *options: str) -> int:
    return main(["merge", str(adapter), "--out", str(out), *options])


def test_pickled_and_mlx_adapters_are_named(tiny, adapter, tmp_path, capsys):
    base = ["--base", str(tiny.model_dir)]
    assert merge(adapter, tmp_path / "good", *base) == 0
    weights = adapter / "adapter_model.safetensors"
    shutil.copy(weights, adapter / "adapter_model.bin")
    assert merge(adapter, tmp_path / "both", *base) == 0
    weights.rename(tmp_path / "weights")
    capsys.readouterr()
    assert merge(adapter, tmp_path / "out", *base) == 8
    said = capsys.readouterr().err
    assert "adapter_model.bin is pickled" in said
    assert "torch.load(file, weights_only=True)" in said
    (adapter / "adapter_model.bin").unlink()
    shutil.copy(tmp_path / "weights", adapter / "adapters.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"model": "org/base", "lora_parameters": {"rank": 2}}))
    for options in ([], base):
        assert merge(adapter, tmp_path / "out", *options) == 2
        assert "has an adapter of MLX (adapters.safetensors)" in capsys.readouterr().err


def test_adapters_of_embeddings_are_named(tiny, tmp_path, capsys):
    base = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert merge(tmp_path / "adapter", tmp_path / "out", "--base", str(tiny.model_dir)) == 2
    assert "adapters of embeddings are not supported, such as that of model.embed_tokens" in capsys.readouterr().err
