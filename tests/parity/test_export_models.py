"""What leaves flatout is what was trained: merged and cast folders, tied weights, answers from a run folder."""

import argparse
import json
import resource
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from usual import usual

from flatout.cli import merge as merge_cli
from flatout.config.schema import LoraConfig
from flatout.errors import ResourceError, UsageError
from flatout.models.export import merge, save_model
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.models.lora.adapter import save_adapter
from flatout.models.lora.layer import add_lora, lora_layers
from flatout.models.stops import stop_token_ids
from flatout.rollout.chat import answer

CPU = torch.device("cpu")
IDS = torch.arange(3, 20)[None]
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m.role }} {{ m.content }} <|stop|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)


def tiny_tokenizer():
    words = ["<pad>", "<unk>", "<|end|>", "<|start|>", "<|stop|>", "system", "user", "assistant", "flatout", "a"]
    words += [f"w{i}" for i in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|end|>",
        additional_special_tokens=["<|start|>", "<|stop|>"], chat_template=TEMPLATE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished LoRA run: base model, config.yaml, final/ with adapter and tokenizer."""
    root = tmp_path_factory.mktemp("runs")
    model = save_tiny_model(root / "base", "qwen3")
    config = LoraConfig(rank=4)
    add_lora(model, config, seed=0)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_b, std=0.1, generator=torch.Generator().manual_seed(0))
    save_adapter(model, root / "run" / "final", base_name="elsewhere", config=config)
    tiny_tokenizer().save_pretrained(root / "run" / "final")
    (root / "run" / "run.json").write_text('{"run_id": "0123456789abcdef", "created": "2026-01-01T00:00:00Z"}')
    (root / "run" / "config.yaml").write_text(yaml.safe_dump({"model": {"name": str(root / "base"), "revision": None}}))
    return root / "run"


@pytest.fixture(scope="module")
def trained(run_dir):
    return load_trained(resolve_model_paths(str(run_dir)), device=CPU)


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def plain_load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


def test_merge_command_writes_a_plain_folder_with_equal_logits(run_dir, trained, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    merge_cli.add_arguments(parser)
    out = tmp_path / "merged"
    merge_cli.run(parser.parse_args([str(run_dir), "--out", str(out)]))
    assert "with 14 layers of" in capsys.readouterr().out
    merged = plain_load(out)
    torch.testing.assert_close(logits(merged), logits(trained[0]), atol=1e-4, rtol=1e-5)
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert "lm_head.weight" not in load_file(out / "model.safetensors"), "tied weights are written once"
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert (out / "tokenizer.json").is_file()
    assert "flatout" not in (out / "config.json").read_text()
    with pytest.raises(ResourceError, match="not empty"):
        merge_cli.run(parser.parse_args([str(run_dir), "--out", str(out)]))
    with pytest.raises(UsageError, match="has no adapter"):
        merge_cli.run(parser.parse_args([str(out), "--out", str(tmp_path / "again")]))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", usual([None, torch.bfloat16], [None]))
def test_saved_model_loads_equal(tmp_path, family, dtype):
    model = tiny_model(family, torch.float32, attention="flatout_documents")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    save_model(model, None, tmp_path, dtype=dtype)
    loaded = plain_load(tmp_path)
    assert loaded.dtype == (dtype or torch.float32)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32, "the live model is not cast"
        assert torch.equal(state[name], tensor.to(loaded.dtype)), name


def test_merge_keeps_the_dtype_and_rounds_once():
    model = tiny_model("llama", torch.bfloat16)
    add_lora(model, LoraConfig(rank=2), seed=0)
    layer = lora_layers(model)["model.layers.0.self_attn.q_proj"]
    torch.nn.init.normal_(layer.lora_b, std=0.1, generator=torch.Generator().manual_seed(0))
    truth = (layer.base.weight.double() + layer.scaling * (layer.lora_b.double() @ layer.lora_a.double())).detach()
    merge(model)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == torch.bfloat16
    # half a unit in the last place of bf16, and the float32 sum's own rounding
    assert bool(((weight.double() - truth).abs() <= truth.abs() * 2**-8 * 1.001 + 1e-7).all())


def greedy(model, tokenizer, messages, num_tokens):
    """The plain way: no cache, the likeliest token, one by one."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    start = len(ids)
    for _ in range(num_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_token_ids(model, tokenizer):
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def test_answers_equal_plain_greedy_decoding_and_stream(trained, capsys):
    model, tokenizer = trained
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w5 w9"}]
    reply = answer(model, tokenizer, messages, max_new_tokens=12, stream=True)
    assert reply
    assert reply == greedy(model, tokenizer, messages, 12)
    assert capsys.readouterr().out.split() == reply.split()


def merge_to(run_dir, out):
    parser = argparse.ArgumentParser()
    merge_cli.add_arguments(parser)
    merge_cli.run(parser.parse_args([str(run_dir), "--out", str(out)]))


def test_a_merge_that_finds_no_room_says_so_and_leaves_nothing(run_dir, tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ResourceError, match=r"cannot write .*merged"):
            merge_to(run_dir, tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match="disk or quota full"):
        merge_to(run_dir, tmp_path / "merged")
    assert not any((tmp_path / "merged").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_an_unfinished_run_and_a_nameless_adapter(run_dir, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {name: x}")
    shutil.copy(run_dir / "run.json", tmp_path)
    with pytest.raises(UsageError, match="not finished"):
        resolve_model_paths(str(tmp_path))
    found = resolve_model_paths(str(run_dir / "final"), base="other")
    assert (found.base, found.adapter) == ("other", run_dir / "final")
    assert resolve_model_paths(str(run_dir / "final")).base == "elsewhere"
    assert resolve_model_paths("org/model").base == "org/model"


def test_a_tokenizer_without_template_is_refused(trained):
    model, _ = trained
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        answer(model, tokenizer, [{"role": "user", "content": "w5"}])
