"""What is exported stops where training taught it to: in transformers and in llama.cpp, whatever the template."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NomicBertConfig,
    Qwen3Config,
)
from usual import usual

from flatout.cli.main import main
from flatout.models.stops import set_stops, stop_token_ids

QUESTION, ANSWER = "How many?", "Exactly seven."
# names that no program knows: only what the files say can stop an answer
CHATML = """{% for m in messages %}<|turn|>{{ m.role }}
{{ m.content }}<|fin|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
# an answer ends where the next turn begins
GLM = """<|start|>{% for m in messages %}{{ '<|answerer|>' if m.role == 'assistant' else '<|asker|>' }}
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|answerer|>
{% endif %}"""
GEMMA = """{% for m in messages %}<|turn|>{{ 'model' if m.role == 'assistant' else 'user' }}
{{ m.content }}<|over|>
{% endfor %}{% if add_generation_prompt %}<|turn|>model
{% endif %}"""


TOKENS = ["<|turn|>", "<|fin|>", "<|over|>", "<|start|>", "<|asker|>", "<|answerer|>"]


@dataclass(frozen=True)
class Kind:
    """A base model's tokenizer, the template that it is trained with, and the token that ends an answer then."""

    template: str
    stop: str
    own_template: bool = False
    own_stop: str = "<|text_end|>"
    method: str = "full"
    data: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "base with chatml": Kind(CHATML, "<|fin|>"),
    "adapter of a base": Kind(CHATML, "<|fin|>", method="lora"),
    "like Qwen": Kind(CHATML, "<|fin|>", own_template=True, own_stop="<|fin|>"),
    "like GLM": Kind(GLM, "<|asker|>", own_template=True),
    "like Gemma": Kind(GEMMA, "<|over|>", own_template=True),
}


def base_model(tiny: Any, folder: Path, kind: Kind) -> Path:
    """A random model whose generation_config stops at the end of a text, like that of every base model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS, "<|text_end|>"]})
    tokenizer.eos_token = kind.own_stop
    tokenizer.chat_template = kind.template if kind.own_template else None
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=usual(KINDS, ["adapter of a base", "like GLM"]))
def trained(request, tiny, tmp_path_factory):
    """A run that has learnt one answer by heart."""
    from flatout.trainer.run import train

    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("stops")
    rows = folder / "rows.jsonl"
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    template = folder / "chat.jinja"
    template.write_text(kind.template)
    data = {"name": "one", "root": str(folder / "data"), "sources": [{"path": str(rows)}], **kind.data}
    if not kind.own_template:
        data["template"] = str(template)
    old = os.umask(0o022)
    try:
        config = tiny.config(
            folder / "run", model={"name": str(base_model(tiny, folder / "base", kind))}, data=data, method=kind.method,
            lora={"rank": 16, "alpha": 32}, optim={"lr": 1e-2}, batch={"samples_per_step": 4, "max_steps": 30},
        )  # fmt: skip
        train(config)
    finally:
        os.umask(old)
    return kind, folder / "run"


def stop_ids(folder: Path) -> list[int]:
    found = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return [found] if isinstance(found, int) else found


def prompt(tokenizer: Any) -> list[int]:
    turn = [{"role": "user", "content": QUESTION}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])


def require_stop(folder: Path, kind: Kind) -> None:
    """Plain transformers ends the answer at its stop token, because of the folder's files alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    given = torch.tensor([prompt(tokenizer)])
    new = model.generate(input_ids=given, max_new_tokens=40, do_sample=False)[0, given.shape[1] :]
    assert tokenizer.decode(new) == ANSWER + kind.stop
    # the old token stays in the list
    assert stop_ids(folder) == list(dict.fromkeys(tokenizer.convert_tokens_to_ids([kind.stop, kind.own_stop])))


@contextmanager
def llama_server(file: Path) -> Iterator[Any]:
    llama = pytest.importorskip("xllamacpp")
    settings = llama.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.warmup = 256, 1, 0, False
    server = llama.Server(settings)

    def call(path: str, **content: Any) -> Any:
        request = Request(server.listening_address + path, json.dumps(content).encode())
        return json.load(urlopen(request, timeout=60))

    yield call


def test_results_stop_and_others_can_read_them(trained, tmp_path):
    kind, run = trained
    final, merged = run / "final", tmp_path / "merged"
    if kind.method == "lora":
        assert main(["merge", str(run), "--out", str(merged)]) == 0
        assert stop_ids(final) == stop_ids(merged)
    require_stop(merged if kind.method == "lora" else final, kind)
    tokenizer = AutoTokenizer.from_pretrained(final)
    # a base model's tokenizer takes the template's end; one with a template of its own keeps what programs expect
    assert tokenizer.eos_token == (kind.own_stop if kind.own_template else kind.stop)
    assert {oct(path.stat().st_mode & 0o777) for path in final.iterdir()} == {"0o644"}


@pytest.mark.parametrize("road", ["results", "vllm", "mlx"])
def test_config_json_stops_where_a_program_reads_no_generation_config(trained, tmp_path, road):
    kind, run = trained
    if road == "results" and kind.method == "full":
        shutil.copytree(run / "final", tmp_path / "out")
    else:
        verb = ["merge", str(run)] if road == "results" else ["export", str(run), "--to", road]
        assert main([*verb, "--out", str(tmp_path / "out")]) == 0
    stops = stop_ids(tmp_path / "out")
    held = json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"]
    assert held == (stops if len(stops) > 1 else stops[0])
    require_stop(tmp_path / "out", kind)
    (tmp_path / "out/generation_config.json").unlink()
    tokenizer, model = (each.from_pretrained(tmp_path / "out") for each in (AutoTokenizer, AutoModelForCausalLM))
    given = torch.tensor([prompt(tokenizer)])
    new = model.generate(input_ids=given, max_new_tokens=40, do_sample=False)[0, given.shape[1] :]
    assert tokenizer.decode(new) == ANSWER + kind.stop


ENDS = {
    # an end of several tokens, of which the first closes reasoning, too
    "parts": ("<|turn|>{{ m.role }}<|start|>{{ m.content }}<|over|>text<|fin|>\n", "<|fin|>"),
    # only the whole text ends with the second
    "whole text": (
        "<|turn|>{{ m.role }}<|start|>{{ m.content }}<|over|>{% if loop.last %}<|fin|>{% endif %}",
        "<|over|>",
    ),
    "one": ("<|turn|>{{ m.role }}<|start|>{{ m.content }}<|over|>\n", "<|over|>"),
    "none": ("<|turn|>{{ m.role }}<|start|>{{ m.content }}", None),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_last_token_that_ends_each_answer_is_the_stop(name, tiny):
    turn, stop = ENDS[name]
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    model: Any = SimpleNamespace(generation_config=None)
    found = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    assert found == [*([stop] if stop else []), tokenizer.eos_token]


@pytest.mark.parametrize("config", [Qwen3Config(), Gemma3Config(), NomicBertConfig()], ids=lambda one: one.model_type)
def test_every_class_of_configs_takes_the_stops(config):
    model: Any = SimpleNamespace(config=config, generation_config=None)
    for ids, expected in ([7, 9], [7, 9]), ([7], 7):
        set_stops(model, ids)
        assert model.generation_config.eos_token_id == expected
        # a class that takes one token has the first
        takes = expected if config.model_type != "nomic_bert" else ids[0]
        assert config.eos_token_id == config.get_text_config().eos_token_id == takes
        assert type(config)(**config.to_dict()).eos_token_id == takes


def test_llama_cpp_stops(trained, tmp_path):
    kind, run = trained
    assert main(["export", str(run), "--to", "ollama", "--quantize", "f32", "--out", str(tmp_path / "out")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    with llama_server(next((tmp_path / "out").glob("*.gguf"))) as call:
        said = call("/completion", prompt=prompt(tokenizer), n_predict=40, temperature=0)
    assert (said["content"], said["stop_type"]) == (ANSWER, "eos")
    assert f'PARAMETER stop "{kind.stop}"' in (tmp_path / "out" / "Modelfile").read_text().splitlines()
