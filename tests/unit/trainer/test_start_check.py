"""What a start would refuse after it has loaded the weights, plan, verify and a restart refuse before, alike."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

import flatout
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import UsageError
from flatout.models.load.source import read_model_config
from flatout.trainer import trainable
from flatout.trainer.model_shape import build_empty
from flatout.trainer.run import train
from flatout.trainer.trainable import make_trainable, prove_read_by_peft
from tests.usual import usual

# setting, what is said, and what is accepted instead
REFUSED = {
    "one of two": ("lora.targets=[q_proj,v_projj]", "'v_projj' matches no linear", "lora.targets=[q_proj,v_proj]"),
    "rank": ("lora.rank=4096", "lora.rank is 4,096, but no layer in lora.targets has a rank above", "lora.rank=8"),
    "inside another": (
        "lora.modules_to_save=[self_attn,q_norm]", "q_norm is inside another module of the list",
        "lora.modules_to_save=[q_norm]",
    ),
    "no weights": ("model.name={bare}", "bare has no *.safetensors weights", "model.name={bare} model.init=random"),
    "a missing shard": ("model.name={sharded}", "weight file b.safetensors is missing", "model.name={whole}"),
    "damaged": ("model.name={damaged}", "model.safetensors is not a valid safetensors file", "model.name={whole}"),
    "other storage": ("model.name={gptq}", "has gptq weights, which are not supported", "model.name={whole}"),
    "no adapter": ("lora.continue_from={bare}", "adapter_config.json is missing; give a folder with an adapter",
        "lora.continue_from={adapter}"),
    "other rank": (
        "lora.continue_from={adapter} lora.rank=2", "lora.rank is 2, but the adapter's is 4",
        "lora.continue_from={adapter} lora.rank=4",
    ),
    "other adapter": ("lora.continue_from={wide}", "the adapter belongs to a different base model",
        "lora.continue_from={adapter}"),
    "frozen": ("method=full freeze=[nothing]", "freeze: 'nothing' matches no parameter", "method=full freeze=[q_proj]"),
    "routers": ("experts.z_loss=0.1", "the routers of model type qwen3 are not known", "experts.z_loss=0"),
    "float8": ("method=full full.compute=fp8", "full.compute: fp8 needs a CUDA GPU", "method=full full.compute=model"),
    "16-bit weights": ("method=full full.weights=bf16", "full.weights: bf16 computes in bf16",
        "method=full full.weights=bf16 model.precision=bf16"),
    "attention": ("model.attention=fa4", "model.attention: fa4 is not possible", "model.attention=sdpa"),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tiny, tmp_path_factory):
    root: Path = tmp_path_factory.mktemp("places")
    folders = {name: root / name for name in ("bare", "sharded", "damaged", "gptq", "whole", "adapter", "wide")}
    for name in ("bare", "sharded", "damaged", "gptq", "whole"):
        shutil.copytree(tiny.model_dir, folders[name])
    weights = load_file(folders["sharded"] / "model.safetensors")
    for name in ("bare", "sharded"):
        (folders[name] / "model.safetensors").unlink()
    save_file(weights, folders["sharded"] / "a.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "a.safetensors") | {min(weights): "b.safetensors"}}
    (folders["sharded"] / "model.safetensors.index.json").write_text(json.dumps(index))
    (folders["damaged"] / "model.safetensors").write_bytes(b"\x00" * 40)
    config = json.loads((folders["gptq"] / "config.json").read_text())
    (folders["gptq"] / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    train(tiny.config(root / "run", batch={"max_steps": 1}))
    shutil.copytree(root / "run" / "final", folders["adapter"])
    shutil.copytree(root / "run" / "final", folders["wide"])
    file = folders["wide"] / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: torch.cat([tensor, tensor], -1) for name, tensor in tensors.items()}, file, {"format": "pt"})
    return folders


def said_by(verb: str, path: Path, settings: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([verb, str(path), *settings])
    error = capsys.readouterr().err
    first = error[error.index("error: ") :].splitlines()[0] if "error: " in error else ""
    return code, first


@pytest.mark.parametrize("case", usual(REFUSED, ["one of two", "damaged", "frozen"]))
def test_plan_verify_train_and_a_restart_refuse_alike(case, tiny, places, tmp_path, capsys):
    bad, said, good = (text.format(**places) for text in REFUSED[case])
    path, run = tmp_path / "run.yaml", tmp_path / "run"
    settings = {"batch": {"max_steps": 1}} | ({"method": "full"} if "method=full" in bad else {})
    path.write_text(dump_config(tiny.config(run, **settings)))
    code, message = said_by("plan", path, shlex.split(bad), capsys)
    assert said in message
    assert code in (2, 4, 6)
    assert said_by("verify", path, shlex.split(bad), capsys) == (code, message)
    assert said_by("train", path, shlex.split(bad), capsys) == (code, message)
    # nothing was loaded before that
    assert "loading" not in (run / "train.log").read_text()
    assert "  model  " not in (run / "train.log").read_text()
    # an earlier run stays where it is
    assert said_by("train", path, [*shlex.split(bad), "--restart"], capsys) == (code, message)
    assert {one.name for one in tmp_path.glob("run*")} == {"run.yaml", "run"}
    assert said_by("plan", path, shlex.split(good), capsys) == (0, "")
    assert said_by("train", path, [*shlex.split(good), "--restart"], capsys) == (0, "")
    assert (tmp_path / "run.old-1").is_dir()


def test_new_tokens_and_tied_weights(tiny, tmp_path, capsys):
    settings = {
        "data": {"new_tokens": ["<a>"], "name": "new", "root": str(tmp_path / "data")},
        "batch": {"max_steps": 1},
    }
    tied = {"modules_to_save": ["embed_tokens"], "keep_tied": False}
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(tiny.config(tmp_path / "run", lora=tied, **settings)))
    first = said_by("plan", path, [], capsys)
    assert "with new tokens, tied embeddings and head train alike" in first[1]
    assert said_by("train", path, [], capsys) == first
    # an adapter with more rows than the files have goes on
    train(tiny.config(tmp_path / "first", lora={"modules_to_save": ["embed_tokens"]}, **settings))
    more = {"modules_to_save": ["embed_tokens"], "continue_from": str(tmp_path / "first" / "final")}
    path.write_text(dump_config(tiny.config(tmp_path / "second", lora=more, **settings)))
    assert said_by("plan", path, [], capsys) == (0, "")
    assert said_by("train", path, [], capsys) == (0, "")


def test_rows_of_new_tokens_are_accepted(tiny, tmp_path, capsys):
    data = {"new_tokens": ["<a>", "<b>"], "name": "new", "root": str(tmp_path / "data")}
    train(tiny.config(tmp_path / "first", data=data, batch={"max_steps": 1}))
    path, more = tmp_path / "run.yaml", {"continue_from": str(tmp_path / "first" / "final")}
    path.write_text(dump_config(tiny.config(tmp_path / "run", data=data, lora=more, batch={"max_steps": 1})))
    for verb, words in {"plan": [], "verify": ["--ranks", "1"], "train": []}.items():
        assert said_by(verb, path, words, capsys) == (0, ""), verb


def test_what_peft_cannot_read_is_said_by_plan(tiny, tmp_path, capsys):
    shape = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 2048}
    shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    CONFIG_MAPPING["laguna"](**shape).save_pretrained(tmp_path / "model")
    model, data = {"name": str(tmp_path / "model"), "init": "random"}, {"tokenizer": str(tiny.model_dir)}
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(tiny.config(tmp_path / "run", model=model, data=data)))
    code, message = said_by("plan", path, [], capsys)
    assert code == 2
    assert "cannot read adapters of model.layers.1.mlp.shared_experts" in message
    assert said_by("train", path, [], capsys) == (code, message)


def test_what_peft_reads_is_asked_once_and_again_for_other_settings(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FLATOUT_CHECK_AGAIN", raising=False)
    monkeypatch.setattr(trainable, "READ_BY_PEFT", {})
    empty = build_empty(read_model_config(str(tiny.model_dir), None), "config.json")

    def prove(**lora):
        config, model = tiny.config(tmp_path / "run", lora=lora), copy.deepcopy(empty)
        make_trainable(model, config, ())
        return prove_read_by_peft(model, config)

    assert prove(rank=4) == 0

    def refuse(*_, **__):
        raise ValueError("asked")

    monkeypatch.setattr(peft, "PeftModel", refuse)
    assert prove(rank=4) == 0
    trainable.READ_BY_PEFT.clear()
    # another process; what loads the weights has other words for the same shape
    empty.config.name_or_path, empty.config.dtype = "elsewhere", torch.bfloat16
    assert prove(rank=4) == 0
    for _ in range(2):  # what was refused is not remembered
        with pytest.raises(UsageError, match="asked"):
            prove(rank=8)
    monkeypatch.setenv("FLATOUT_CHECK_AGAIN", "1")
    trainable.READ_BY_PEFT.clear()
    with pytest.raises(UsageError, match="asked"):
        prove(rank=4)


def test_an_adapter_is_no_model_and_the_message_names_both(tiny, places, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(tiny.config(tmp_path / "run", batch={"max_steps": 1})))
    assert main(["train", str(path), f"model.name={places['adapter']}"]) == 2
    error = capsys.readouterr().err
    assert "is an adapter, not a model" in error
    (step,) = [line for line in error.splitlines() if "lora.continue_from" in line]
    assert main(["train", str(path), *shlex.split(step, comments=True)[1:]]) == 0
    assert "continues from" in capsys.readouterr().out


def test_an_adapter_of_random_weights_is_told_to_be_of_no_use(tiny, tmp_path, capsys):
    path, run = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(dump_config(tiny.config(run, batch={"max_steps": 1}, model={"init": "random"})))
    assert main(["train", str(path)]) == 0
    said = capsys.readouterr().out
    assert "which no file keeps, measures speed only" in " ".join(said.split())
    # what would load the adapter is no next command
    assert [line.split()[-2:] for line in said.splitlines() if "flatout " in line] == [["report", str(run)]]
    assert main(["merge", str(run), "--out", str(tmp_path / "merged")]) == 2
    assert "trained over random weights (model.init: random), which no file keeps" in capsys.readouterr().err
    # what it says instead works
    full = tiny.config(tmp_path / "full", batch={"max_steps": 1}, model={"init": "random"}, method="full")
    path.write_text(dump_config(full))
    assert main(["train", str(path)]) == 0
    said = capsys.readouterr().out
    assert "measures speed only" not in said
    assert f"flatout chat {tmp_path / 'full'}" in said
    assert main(["chat", str(tmp_path / "full"), "--prompt", "Hi", "--max-new-tokens", "2"]) == 0


VARIABLE, PATH = "${MODEL}", "C:\\Users\\me"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (VARIABLE, "write the name itself, or give it on the command line, where shells have them"),
        (f'"{PATH}"', "line 2: use single quotes, which keep a backslash as it is"),
        (f"'{PATH}'", f"there is no folder {PATH}"),
    ],
)
def test_names_that_other_files_may_have(tiny, tmp_path, capsys, name, said):
    path = tmp_path / "run.yaml"
    path.write_text(f"model:\n  name: {name}\ndata: {{sources: [{{path: '{tiny.chats}'}}]}}\n")
    code, message = said_by("plan", path, [], capsys)
    assert code == 2
    assert said in message
    assert "name: value" not in message
    assert said_by("plan", path, [f"model.name={tiny.model_dir}"], capsys)[0] == (2 if "line 2" in said else 0)


def test_values_without_names_are_named(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for verb in (flatout.plan, flatout.train):
        with pytest.raises(UsageError, match="takes one value without a name, the configuration") as raised:
            verb(str(tiny.model_dir), str(tiny.chats))
        call = str(raised.value).rpartition(": ")[2].replace(")", ", device='cpu')")
        if verb is flatout.plan:
            assert "fits" in str(eval(call))  # noqa: S307  (what the message says to write)
