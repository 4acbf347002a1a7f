"""Every exported adapter is the one that PEFT reads; what PEFT cannot read is refused before training."""

import json
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model, tiny_model
from transformers import CONFIG_MAPPING
from usual import every, usual

from flatout.checkpoint.manifest import verify_final
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.config.schema import BaseConfig, LoraConfig, ModelConfig
from flatout.errors import UsageError
from flatout.models.load.model import load_model
from flatout.models.lora import adapter
from flatout.models.lora.adapter import adapter_state, apply_adapter, load_adapter, save_adapter
from flatout.models.lora.layer import add_lora, lora_layers
from flatout.models.lora.read_back import read_back
from flatout.trainer.run import train

IDS = torch.arange(3, 20)[None]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OWN = {"num_experts": 4, **_EXPERTS}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, **_EXPERTS}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
# PEFT takes gate_proj, up_proj and down_proj of these for fused experts, though dense and shared layers have them too
EXPERT_NAMES = {
    "deepseek_v2": {**_ROUTED, **_LATENT, "topk_group": 1, "q_lora_rank": None},
    "deepseek_v3": {**_ROUTED, **_LATENT, "topk_group": 1, "q_lora_rank": 16},
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "q_lora_rank": 16},
    "dots1": _ROUTED,
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "afmoe": {**_OWN, "num_dense_layers": 1, "num_shared_experts": 1},
    "exaone_moe": {**_OWN, "first_k_dense_replace": 1, "num_shared_experts": 1},
    "solar_open": _ROUTED,
    "qwen3_moe": {**_OWN, "mlp_only_layers": [0]},
}  # fmt: skip


def adapted(family, dtype=torch.float32, *, settings=None, **changes):
    """A tiny model with an adapter that does something."""
    model, config = tiny_model(family, dtype, **changes), LoraConfig(rank=3, alpha=5, **(settings or {}))
    add_lora(model, config, seed=3)
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(model).values():
        layer.lora_b.data.copy_(torch.randn(layer.lora_b.shape, generator=generator) * 0.1)
    return model, config


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("targets", ["all-linear", ["all-linear", "experts"]], ids=["linear", "experts"])
@pytest.mark.parametrize("family", usual(EXPERT_NAMES, ["deepseek_v3", "ernie4_5_moe", "qwen3_moe"]))
def test_dense_layers_and_shared_experts_survive_the_way_through_peft(tmp_path, family, targets):
    ours, config = adapted(family, settings={"targets": targets, "rank_pattern": {}}, **EXPERT_NAMES[family])
    save_adapter(ours, tmp_path, base_name="tiny", config=config)
    assert "logits within" in reading(ours, tmp_path)
    assert config.rank_pattern == config.alpha_pattern == {}
    theirs = PeftModel.from_pretrained(tiny_model(family, torch.float32, **EXPERT_NAMES[family]), str(tmp_path)).eval()
    torch.testing.assert_close(logits(theirs), logits(ours), atol=1e-4, rtol=1e-4)
    again = tiny_model(family, torch.float32, **EXPERT_NAMES[family])
    apply_adapter(again, tmp_path)
    assert torch.equal(logits(again), logits(ours))


def reading(model, folder):
    """What is told of an adapter that PEFT reads as trained."""
    text, is_same = read_back(model, folder)
    assert is_same, text
    return text


def difference(model, folder):
    text, is_same = read_back(model, folder)
    assert not is_same, text
    return text


def rewrite(folder: Path, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_an_adapter_that_peft_reads_otherwise_is_never_passed(tmp_path):
    ours, config = adapted("qwen3_moe", **EXPERT_NAMES["qwen3_moe"])
    save_adapter(ours, tmp_path, base_name="tiny", config=config)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    names = sorted({name.rpartition(".")[2] for name in lora_layers(ours)})
    rewrite(tmp_path, target_modules=names, target_parameters=None)
    assert "layers.0.mlp.down_proj.lora_A.weight is missing" in difference(ours, tmp_path)
    rewrite(tmp_path, **{**written, "lora_alpha": 10})
    assert "changes its weight by another value" in difference(ours, tmp_path)
    rewrite(tmp_path, **written)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    first = min(tensors)
    save_file({**tensors, first: tensors[first] * 1.01}, tmp_path / "adapter_model.safetensors")
    assert f"{first} is different" in difference(ours, tmp_path)


def turned_experts(state):
    """B of experts as (out, E r) instead of (out, r E): PEFT would give each expert the columns of others."""
    return {name: tensor.transpose(1, 2).flatten(1) if tensor.dim() == 3 else tensor for name, tensor in state.items()}


def swapped_name(name, layer):
    path, _, leaf = name.rpartition(".")
    return f"{path}.{({'k_proj': 'v_proj', 'v_proj': 'k_proj'}).get(leaf, leaf)}"


def other_sign(state):
    return {name: -tensor if "lora_B" in name else tensor for name, tensor in state.items()}


WRONG_WAYS = {
    "the layout of experts": ("in_peft_shapes", turned_experts, "qwen3_moe"),
    "a sign": ("in_peft_shapes", other_sign, "llama"),
    "names": ("_peft_name", swapped_name, "llama"),
}


@pytest.mark.parametrize("dtype", usual([torch.bfloat16, torch.float32], [torch.bfloat16]))
@pytest.mark.parametrize("way", WRONG_WAYS)
def test_a_wrong_conversion_on_the_way_out_is_found(tmp_path, monkeypatch, way, dtype):
    """Flatout's own reading of the files may undo it, as that of names does: only the live weights tell."""
    attribute, wrong, family = WRONG_WAYS[way]
    changes = EXPERT_NAMES.get(family, {})
    targets = ["all-linear", "experts"] if family in EXPERT_NAMES else "all-linear"
    ours, config = adapted(family, dtype, settings={"targets": targets}, **changes)
    save_adapter(ours, tmp_path / "right", base_name="tiny", config=config)
    reading(ours, tmp_path / "right")
    monkeypatch.setattr(adapter, attribute, wrong)
    monkeypatch.setattr("flatout.models.lora.read_back.in_peft_shapes", adapter.in_peft_shapes)
    save_adapter(ours, tmp_path / "wrong", base_name="tiny", config=config)
    if way == "names":
        again = tiny_model(family, dtype, **changes)
        apply_adapter(again, tmp_path / "wrong")
        assert torch.equal(logits(again), logits(ours))
    assert "changes its weight by another value" in difference(ours, tmp_path / "wrong")


READ = [
    (settings, dtype)
    for settings in ({}, {"dora": True}, {"rslora": True}, {"targets": ["q_proj", "lm_head"]})
    for dtype in (torch.bfloat16, torch.float64)
]


@pytest.mark.parametrize(("settings", "dtype"), every(3, READ))
def test_reading_back_holds_in_every_precision(tmp_path, settings, dtype):
    ours, config = adapted("llama", dtype, settings=settings)
    save_adapter(ours, tmp_path, base_name="tiny", config=config)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert ("logits within" in reading(ours, tmp_path)) == (dtype == torch.float64)
    assert ours.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_a_quantized_base_is_read_back_by_changes(tmp_path):
    save_tiny_model(tmp_path / "base", "llama")
    settings = {"method": "lora", "device": torch.device("cpu"), "seed": 0, "base": BaseConfig(storage="nf4")}
    model = load_model(ModelConfig(name=str(tmp_path / "base"), precision="fp32"), **settings).model
    config = LoraConfig(rank=2)
    add_lora(model, config, seed=0)
    next(iter(lora_layers(model).values())).lora_b.data.fill_(0.1)
    save_adapter(model, tmp_path / "adapter", base_name="tiny", config=config)
    assert "14 layers, changes within" in reading(model, tmp_path / "adapter")
    rewrite(tmp_path / "adapter", lora_alpha=77)
    assert "changes its weight by another value" in difference(model, tmp_path / "adapter")
    rewrite(tmp_path / "adapter", target_modules=["q_proj"])
    assert "is missing" in difference(model, tmp_path / "adapter")


def test_what_peft_cannot_read_is_refused_before_training(tiny, tmp_path):
    shape = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 2048, **_OWN}
    CONFIG_MAPPING["laguna"](**shape).save_pretrained(tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "init": "random"}
    data = {"tokenizer": str(tiny.model_dir)}
    with pytest.raises(UsageError, match=r"PEFT .* cannot read adapters of model\.layers\.1\.mlp\.shared_experts"):
        train(tiny.config(tmp_path / "run", model=model, data=data))
    assert not (tmp_path / "run" / "checkpoints").exists()
    # what the message names trains
    left = ["q_proj", "k_proj", "v_proj", "o_proj", "g_proj"]
    train(tiny.config(tmp_path / "other", model=model, data=data, lora={"targets": left}, batch={"max_steps": 1}))
    ours, config = adapted("qwen3_moe", settings={"dora": True}, **EXPERT_NAMES["qwen3_moe"])
    with pytest.raises(UsageError, match=r"lora\.targets: .* exclude down_proj") as refused:
        save_adapter(ours, tmp_path / "adapter", base_name="tiny", config=config)
    assert refused.value.fixes[0].settings == {"lora.dora": False}


def test_a_run_tells_that_its_adapter_was_read_back(tiny, tmp_path, capsys):
    train(tiny.config(tmp_path / "run", batch={"max_steps": 1}))
    assert "reads the same adapter: 14 layers, changes within" in capsys.readouterr().out


def test_a_full_gpu_leaves_the_comparison_to_the_cpu(tmp_path, monkeypatch):
    ours, config = adapted("qwen3")
    save_adapter(ours, tmp_path, base_name="tiny", config=config)
    devices, load = [], PeftModel.from_pretrained

    def full_at_first(*args, torch_device, **options):
        devices.append(torch_device)
        if len(devices) == 1:
            raise torch.OutOfMemoryError
        return load(*args, torch_device=torch_device, **options)

    monkeypatch.setattr("peft.PeftModel.from_pretrained", full_at_first)
    assert "reads the same adapter" in reading(ours, tmp_path)
    assert devices == [str(ours.device), "cpu"]


def broken(*args, **options):
    raise RuntimeError("out of memory, say")


@pytest.mark.parametrize(
    ("place", "wrong", "told"),
    [
        ("flatout.models.lora.adapter.in_peft_shapes", other_sign, "reads a different adapter"),
        ("peft.PeftModel.from_pretrained", broken, "could not be compared with what PEFT reads: out of memory, say"),
    ],
)
def test_a_result_is_written_whatever_peft_reads(tiny, tmp_path, monkeypatch, capsys, place, wrong, told):
    folder = tmp_path / "run"
    config = tiny.config(
        folder, batch={"max_steps": 3}, optim={"lr": 0.05}, eval={"fraction": 0.1, "every_steps": 1},
        schedule={"kind": "constant"},
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(dump_config(config))
    monkeypatch.setattr(place, wrong)
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "adapter_differs" in said
    assert told in said
    monkeypatch.undo()
    written = [folder / name for name in ("final", "best") if (folder / name).exists()]
    for place in written:
        verify_final(place)
        assert peft.PeftConfig.from_pretrained(place).r == 4
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["folder"] for event in events if event["kind"] == "adapter_differs"] == list(map(str, written))
    assert json.loads((folder / "end.json").read_text())["outcome"] == "complete"
    assert main(["report", str(folder), "--format", "md"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    # what goes on from it works, too
    assert main(["merge", str(folder), "--out", str(tmp_path / "merged")]) == 0


def head_adapter_of_peft(folder):
    theirs = get_peft_model(
        tiny_model("llama", torch.float32),
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "lm_head"], init_lora_weights=False),
    ).eval()
    theirs.save_pretrained(folder)
    return theirs


def test_an_adapter_on_the_head_from_peft_goes_on(tmp_path):
    theirs = head_adapter_of_peft(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    base = "base_model.model.lm_head.base_layer.weight"
    assert base in stored
    ours = tiny_model("llama", torch.float32)
    add_lora(ours, LoraConfig(rank=3, alpha=5, targets=["q_proj", "lm_head"]), seed=9)
    load_adapter(ours, tmp_path)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)
    save_file({**stored, base: stored[base] + 1}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"differs from the base model's lm_head\.weight"):
        load_adapter(ours, tmp_path)


def test_the_weight_of_a_linear_layer_is_read_as_a_target(tmp_path):
    target = "model.layers.0.mlp.down_proj"
    settings = {"r": 3, "lora_alpha": 5, "init_lora_weights": False}
    linear = peft.LoraConfig(target_modules=["q_proj"], target_parameters=[f"{target}.weight"], **settings)
    theirs = get_peft_model(tiny_model("llama", torch.float32), linear).eval()
    theirs.save_pretrained(tmp_path / "linear")
    ours = tiny_model("llama", torch.float32)
    apply_adapter(ours, tmp_path / "linear")
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)
    assert f"base_model.model.{target}.lora_A.weight" in adapter_state(ours)
