"""Modules trained in full, rows of new tokens, and shapes that differ by layer: as in PEFT, in every file."""

import copy
import json
import logging

import peft
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from usual import usual

from flatout.cli.main import main
from flatout.config.schema import BaseConfig, LoraConfig, ModelConfig
from flatout.errors import UsageError
from flatout.kernels.cross_entropy.tiled import token_loss
from flatout.models.export import merge, save_model
from flatout.models.load.model import Loading, load_model
from flatout.models.lora.adapter import apply_adapter, load_adapter, save_adapter
from flatout.models.lora.layer import add_lora, lora_layers, trainable_parameters, without_adapter
from flatout.models.lora.read_back import read_back
from flatout.models.lora.saved import SavedModule, grow_vocabulary, rows_of_tokens, saved_modules
from flatout.models.token_head import scaled_logits
from flatout.trainer.run import train

IDS = torch.arange(3, 20)[None]
# settings, whether embeddings and head are tied, token ids whose rows are trained
CASES = {
    "ends": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False, []),
    "tied": ({"modules_to_save": ["lm_head"]}, True, []),
    "apart": ({"modules_to_save": ["embed_tokens", "lm_head"], "keep_tied": False}, True, []),
    "head apart": ({"modules_to_save": ["lm_head"], "keep_tied": False}, True, []),
    "inner": ({"modules_to_save": ["model.norm", "input_layernorm", "gate_proj"], "layers": "1"}, False, []),
    "tied rows": ({}, True, [5, 9]),
    "rows": ({}, False, [5, 9]),
    "rows and head": ({"modules_to_save": ["lm_head"]}, False, [5, 9]),
    "patterns": (
        {"rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 5}, "alpha_pattern": {"v_proj": 3}, "layers": [1]},
        False,
        [],
    ),
}


def adapted(case, family="llama", dtype=torch.float64):
    """A tiny model with all that the case trains moved away from its start, its settings, and the plain model."""
    settings, tied, tokens = CASES[case]
    plain = tiny_model(family, dtype, tie_word_embeddings=tied)
    config, model = LoraConfig(rank=3, alpha=5, **settings), copy.deepcopy(plain)
    add_lora(model, config, seed=3, rows=rows_of_tokens(model, config, tokens))
    generator = torch.Generator().manual_seed(1)
    for parameter in trainable_parameters(model).values():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    return model, config, plain


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", usual(["llama", "gemma2"], ["llama"]))
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_files_are_pefts_and_merged_is_equal(tmp_path, case, family):
    ours, config, plain = adapted(case, family)
    save_adapter(ours, tmp_path / "adapter", base_name="tiny", config=config)
    assert read_back(ours, tmp_path / "adapter").is_same
    theirs = PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path / "adapter")).eval()
    again, goes_on = copy.deepcopy(plain), copy.deepcopy(plain)
    apply_adapter(again, tmp_path / "adapter")
    add_lora(goes_on, config, seed=9, rows=rows_of_tokens(goes_on, config, CASES[case][2]))
    load_adapter(goes_on, tmp_path / "adapter")
    wanted = logits(ours)
    assert (wanted - logits(plain)).abs().max() > 0.1
    for model in (theirs, again, goes_on):
        torch.testing.assert_close(logits(model), wanted, atol=1e-6, rtol=1e-6)
    with without_adapter(ours):
        assert torch.equal(logits(ours), logits(plain))
    merge(again)
    torch.testing.assert_close(logits(again), wanted, atol=1e-6, rtol=1e-6)
    save_model(again, None, tmp_path / "merged")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits(read), wanted, atol=1e-4, rtol=1e-4)


def test_adapters_of_peft_are_read(tmp_path):
    plain = tiny_model("llama", torch.float32, tie_word_embeddings=True)
    layout = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    others = {
        "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "layers": {"layers_to_transform": [1], "layers_pattern": "layers", "rank_pattern": {"q_proj": 6}},
        "rows": {"trainable_token_indices": [4, 7]},
    }
    for name, options in others.items():
        theirs = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(**layout, **options)).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
        theirs.save_pretrained(tmp_path / name)
        ours = copy.deepcopy(plain)
        apply_adapter(ours, tmp_path / name)
        torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)
    assert {layer.rank for layer in lora_layers(tiny_like(plain, tmp_path / "layers")).values()} == {3, 6}


def tiny_like(plain, folder):
    model = copy.deepcopy(plain)
    apply_adapter(model, folder)
    return model


def test_an_adapter_with_more_tokens_than_the_model_grows_it(tmp_path, monkeypatch, caplog):
    # not once a process, so that it does not matter who resized a model before
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning)
    transformers_logging.get_logger("transformers").addHandler(caplog.handler)
    transformers_logging.set_verbosity_warning()
    bigger = tiny_model("llama", torch.float32)
    num_rows = len(bigger.get_input_embeddings().weight)
    plain = copy.deepcopy(bigger)
    grow_vocabulary(bigger, num_rows + 2)
    grown = bigger.get_input_embeddings().weight.detach().clone()
    config = LoraConfig(rank=2)
    add_lora(bigger, config, seed=0, rows=rows_of_tokens(bigger, config, [num_rows, num_rows + 1]))
    save_adapter(bigger, tmp_path, base_name="tiny", config=config)
    again = copy.deepcopy(plain)
    apply_adapter(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(bigger))
    # as transformers starts them, the same each time
    other = copy.deepcopy(plain)
    grow_vocabulary(other, num_rows + 2)
    assert torch.equal(other.get_input_embeddings().weight, grown)
    assert caplog.messages == []  # of new rows that the adapter's replace
    plain.resize_token_embeddings(num_rows + 2)
    if transformers_logging.get_logger("transformers.modeling_utils").isEnabledFor(logging.WARNING):
        assert "will be initialized" in caplog.text
    transformers_logging.get_logger("transformers").removeHandler(caplog.handler)
    PeftModel.from_pretrained(plain, str(tmp_path))


def test_trained_rows_get_the_gradient_of_the_whole_weight():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (70, 50))
    targets, ids = torch.arange(70) % 50, torch.tensor([3, 49])
    rows = (weight[ids] * 1.5).requires_grad_()
    loss, *_ = token_loss(hidden.requires_grad_(), weight, targets, trained_rows=(ids, rows), tile_rows=16, softcap=5.0)
    got = torch.autograd.grad(loss, (hidden, rows))
    whole = weight.index_copy(0, ids, rows.detach()).requires_grad_()
    wanted = F.cross_entropy(scaled_logits(hidden @ whole.T, 1.0, 5.0), targets, reduction="sum")
    hidden_grad, weight_grad = torch.autograd.grad(wanted, (hidden, whole))
    torch.testing.assert_close(got, (hidden_grad, weight_grad[ids]), atol=1e-12, rtol=1e-12)


def test_a_saved_module_stays_dense_under_4_bits(tmp_path):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path)
    names = ["down_proj", "lm_head"]
    model = load_model(
        ModelConfig(name=str(tmp_path), precision="fp32"), method="lora", device=torch.device("cpu"), seed=0,
        base=BaseConfig(storage="nf4"), how=Loading(keep_dense=names),
    ).model  # fmt: skip
    add_lora(model, LoraConfig(rank=2, modules_to_save=names), seed=0)
    saved = [held for held in saved_modules(model).values() if isinstance(held, SavedModule)]
    assert len(saved) == 3
    assert all(type(held.base) is torch.nn.Linear for held in saved)
    assert not any("down_proj" in name for name in lora_layers(model))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modules_to_save": ["lm_haed"]}, "lora.modules_to_save: 'lm_haed' matches no module"),
        ({"modules_to_save": ["mlp", "gate_proj"]}, "is inside another module"),
        ({"layers": "0-9"}, "lora.layers: there is no layer 9"),
        ({"targets": ["q_proj"], "modules_to_save": ["q_proj"]}, "lora.modules_to_save"),
        ({"rank_pattern": {"q_proj": 99}}, "lora.rank is 99"),
    ],
)
def test_what_does_not_fit_the_model_is_named(settings, words):
    with pytest.raises(UsageError, match=words):
        add_lora(tiny_model("llama", torch.float32), LoraConfig(**settings), seed=0)


SETTINGS = {
    "data": {"new_tokens": ["<tool>", "?"], "new_special_tokens": ["<|end_of_tool|>"]},
    "lora": {"modules_to_save": ["norm"], "layers": "1", "rank_pattern": {"q_proj": 2}},
}


def test_a_run_as_typed_resumes_to_the_bit_and_goes_on(tiny, tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    rows = [json.loads(line) for line in tiny.chats.read_text().splitlines()][:30]
    for row in rows:
        row["messages"][-1]["content"] += " <tool>"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {**SETTINGS["data"], "root": str(tmp_path / "data"), "sources": [{"path": str(chats)}]}
    common = {"data": data, "lora": SETTINGS["lora"]}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny.config(whole, **common, batch={"max_steps": 4}, checkpoint={"every_steps": 2}))
    assert "not added, as they exist: '?'" in " ".join(capsys.readouterr().out.split())
    train(tiny.config(cut, **common, batch={"max_steps": 2}))
    changed = {"max_steps": 4}
    allow = {"allow_change": ["batch.max_steps"]}
    train(tiny.config(cut, **common, batch=changed, checkpoint=allow))
    files = [folder / "final" / "adapter_model.safetensors" for folder in (whole, cut)]
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    plain = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float32)
    plain.resize_token_embeddings(len(tokenizer))
    theirs = PeftModel.from_pretrained(plain, str(whole / "final")).eval()
    assert main(["merge", str(whole), "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = tokenizer("Hello <tool>", return_tensors="pt").input_ids
    assert tokenizer.convert_tokens_to_ids("<tool>") in ids[0]
    torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    start = {**common, "lora": {**SETTINGS["lora"], "continue_from": str(whole / "final")}}
    train(tiny.config(tmp_path / "more", **start, batch={"max_steps": 1}))
    without = {**start, "data": {**data, "new_tokens": []}}
    with pytest.raises(UsageError, match=r"data\.new_tokens trains the rows"):
        train(tiny.config(tmp_path / "other", **without, batch={"max_steps": 1}))
