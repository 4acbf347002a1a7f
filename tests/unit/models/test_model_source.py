"""What a model folder may hold: data only. Every attack and damage is refused with the file's name."""

import json
import struct

import huggingface_hub.constants
import pytest
import torch
from tiny_models import save_tiny_model
from usual import usual

from flatout.config.folders import run_identity
from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError, SecurityError, UsageError
from flatout.models.load.inference import load_for_inference
from flatout.models.load.model import load_model
from flatout.models.load.source import check_source, read_model_config

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    save_tiny_model(tmp_path, "llama")
    return tmp_path


def load(folder, **settings):
    return load_model(ModelConfig(name=str(folder), **settings), method="lora", device=CPU, seed=0)


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


CODE = [
    {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
    {"attn_implementation": "kernels-community/evil"},
    {"layers": [{"inner": {"auto_map": {"AutoConfig": "x.Y"}}}]},
    {"attn_implementation": {"text_config": {"": "evil/kernel:f"}}},
    {"_attn_implementation_internal": "evil/kernel"},
    {"text_config": {"trust_remote_code": True}},
    {"use_kernels": True},
    {"attn_implementation": {"": "evil/kernel"}},
    {"experts_implementation": ["evil/kernel"]},
]


@pytest.mark.parametrize("fields", usual(CODE, CODE[:4]))
def test_code_in_the_config_is_refused_at_any_depth(folder, fields):
    edit_config(folder, **fields)
    with pytest.raises(SecurityError, match=r"config\.json.*run code"):
        load(folder)


def test_harmless_interface_names_pass(folder):
    edit_config(folder, attn_implementation="sdpa", _attn_implementation={"": "eager"}, auto_map=None)
    read_model_config(str(folder), None)


def test_pickled_weights_are_refused_and_never_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SecurityError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load(folder)


@pytest.mark.parametrize("kept_bytes", [0, 20, 5000])
def test_weights_of_the_hub_whose_download_did_not_finish(tmp_path, monkeypatch, kept_bytes):
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    save_tiny_model(snapshot, "llama")
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    file = snapshot / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="org/tiny: its downloaded weights are damaged"):
        load_for_inference("org/tiny", device=CPU)


@pytest.mark.parametrize("damage", ["huge header", "truncated", "empty", "not json"])
def test_damaged_safetensors_name_the_file(folder, damage):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(
        {
            "huge header": struct.pack("<Q", 2**40) + content[8:],
            "truncated": content[: len(content) // 2],
            "empty": b"",
            "not json": content[:8] + b"x" * (len(content) - 8),
        }[damage]
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_index_that_leaves_the_folder(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../outside.safetensors"}}))
    with pytest.raises(SecurityError, match="outside the folder"):
        check_source(str(folder), None)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        check_source(str(folder), None)


@pytest.mark.parametrize("weight_map", [[], None, "x", {"a": 7}, {"a": None}, {"a": ["b"]}])
def test_index_whose_map_is_none(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map"):
        check_source(str(folder), None)


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"a":' * 100_000], ids=["cut", "list", "null", "deep"])
def test_broken_config_names_the_file(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_model_config(str(folder), None)


def test_a_missing_weight_is_never_made_up(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight"):
        load(folder)


def test_missing_folder_and_adapter_folder(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        read_model_config(str(tmp_path / "gone"), None)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="is an adapter"):
        read_model_config(str(tmp_path), None)


def test_a_run_is_no_model_and_a_model_beside_a_runs_file_is_one(tmp_path):
    run_identity(tmp_path)
    with pytest.raises(UsageError, match="is a run, not a model"):
        read_model_config(str(tmp_path), None)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_model_config(str(tmp_path), None) == {"model_type": "qwen3"}


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no \\*\\.safetensors weights"):
        load(folder)
