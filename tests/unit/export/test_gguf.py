"""The GGUF file holds the merged model: every tensor, the tokenizer, and what a program needs to run it."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

from flatout.api.run import Run
from flatout.cli.main import main
from flatout.errors import UsageError

gguf = pytest.importorskip("gguf")

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
SHAPES = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "dtype": "bfloat16"}),
    "mistral": (MistralConfig, {"sliding_window": 256, "head_dim": 32}),
    "qwen2": (Qwen2Config, {"rope_parameters": YARN}),
}


def model_folder(tiny: Any, folder: Path, config_class: Any, **settings: Any) -> Path:
    """A random model with tiny's tokenizer, and rows of the embedding that no token has."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    torch.manual_seed(0)
    config = config_class(vocab_size=len(tokenizer) + 5, initializer_range=0.1, **sizes, **heads, **ids, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=settings.get("dtype", "float32"))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata, and tensors as floats, of the one GGUF file of a folder."""
    reader = gguf.GGUFReader(next(folder.glob("*.gguf")))
    facts = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    return facts, tensors


def back_to_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k: pairs (j, j + d/2) stand beside each other there."""
    dim = len(rows) // num_heads
    order = [
        head * dim + (place % (dim // 2)) * 2 + place // (dim // 2) for head in range(num_heads) for place in range(dim)
    ]
    return rows[order]


def require_equal(folder: Path, tensors: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    """Every weight of a model folder is in the file, and nothing else but factors of rope."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    config, state = plain.config, plain.state_dict()
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    arch_id = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    mapped = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in state}
    assert mapped.keys() == tensors.keys() - {"rope_freqs.weight"}
    for name, own in mapped.items():
        found, leaf = tensors[name], own.split(".")[-2]
        if arch == "llama" and leaf in heads:
            found = back_to_halves(found, heads[leaf])
        expected = state[own].float().numpy()
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=own)


def test_a_runs_file_equals_its_merged_model(run_dir, tmp_path, capsys):
    assert main(["merge", str(run_dir), "--out", str(tmp_path / "merged")]) == 0
    assert main(["export", str(run_dir), "--to", "gguf", "--out", str(tmp_path / "gguf")]) == 0
    assert f"llama-cli -m {tmp_path / 'gguf' / 'chats-f32.gguf'}" in capsys.readouterr().out
    facts, tensors = read(tmp_path / "gguf")
    require_equal(tmp_path / "merged", tensors)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert facts["general.architecture"] == "qwen3"
    expected = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }  # fmt: skip
    assert {name: facts[f"qwen3.{name}"] for name in expected} == pytest.approx(
        {name: config[ours] for name, ours in expected.items()}
    )
    tokens = facts["tokenizer.ggml.tokens"]
    assert tokens == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    assert facts["tokenizer.ggml.merges"] == [" ".join(pair) for pair in backend["model"]["merges"]]
    assert facts["tokenizer.ggml.pre"] == "gpt-2"
    assert facts["tokenizer.ggml.eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert facts["tokenizer.ggml.eot_token_id"] == facts["tokenizer.ggml.eos_token_id"]
    assert facts["tokenizer.ggml.add_bos_token"] is False
    assert facts["tokenizer.chat_template"] == tokenizer.chat_template
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token_id for token_id, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    assert special == sorted(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", SHAPES)
def test_every_architecture_goes_out_and_back(tiny, tmp_path, name):
    config_class, settings = SHAPES[name]
    folder = model_folder(tiny, tmp_path / name, config_class, **settings)
    assert main(["export", str(folder), "--to", "gguf", "--out", str(tmp_path / "out")]) == 0
    facts, tensors = read(tmp_path / "out")
    require_equal(folder, tensors)
    assert facts["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    arch = facts["general.architecture"]
    if name == "llama":
        # as llama.cpp divides the frequencies by them: the highest stay, the lowest are divided by 8
        factors = tensors["rope_freqs.weight"]
        assert (factors[0], factors[-1]) == pytest.approx((1.0, 8.0))
        assert facts["llama.rope.freq_base"] == 5e5
    if name == "mistral":
        assert facts["llama.context_length"] == 256
    if name == "qwen2":
        assert facts[f"{arch}.rope.scaling.type"] == "yarn"
        assert facts[f"{arch}.rope.scaling.original_context_length"] == 128
    if name == "biases":
        assert facts["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


@pytest.mark.parametrize(("kind", "tolerance"), [("q8_0", 1 / 127), ("f16", 2**-11), ("bf16", 2**-8)])
def test_a_named_encoding_is_used_for_matrices(run_dir, tmp_path, kind, tolerance):
    assert main(["merge", str(run_dir), "--out", str(tmp_path / "merged")]) == 0
    command = ["export", str(run_dir), "--to", "gguf", "--quantize", kind, "--out", str(tmp_path / "out")]
    assert main(command) == 0
    reader = gguf.GGUFReader(tmp_path / "out" / f"chats-{kind}.gguf")
    kinds = {one.tensor_type.name for one in reader.tensors if len(one.shape) > 1}
    assert kinds == {kind.upper()}
    assert {one.tensor_type.name for one in reader.tensors if len(one.shape) == 1} == {"F32"}
    require_equal(tmp_path / "merged", read(tmp_path / "out")[1], tolerance)


def program(path: Path, code: str) -> None:
    """A stand-in for a program of llama.cpp."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# what llama.cpp's converter writes of a tokenizer whose end of turn it does not know
CONVERTER = """
print(*sys.argv[1:])
import gguf, json, numpy
found = json.loads(pathlib.Path(sys.argv[1], "tokenizer.json").read_text())
ids = found["model"]["vocab"] | {one["content"]: one["id"] for one in found["added_tokens"]}
writer = gguf.GGUFWriter(sys.argv[3], "gemma2")
writer.add_token_list(sorted(ids, key=ids.get))
writer.add_eos_token_id(0)
writer.add_tensor("converted", numpy.float32([1, 2]))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def test_other_encodings_need_llama_quantize(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    command = ["export", str(run_dir), "--to", "gguf", "--quantize", "q4_k_m", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "quantization q4_k_m needs llama.cpp's llama-quantize" in capsys.readouterr().err
    with pytest.raises(UsageError, match="q4_k_m needs llama") as refused:
        Run(run_dir).export("gguf", tmp_path / "out", kind="q4_k_m")
    assert refused.value.fixes[0].settings == {"--quantize": "q8_0"}
    assert not (tmp_path / "out").exists()
    code = "pathlib.Path(sys.argv[2]).write_bytes(pathlib.Path(sys.argv[1]).read_bytes() + sys.argv[3].encode())"
    program(tmp_path / "llama.cpp" / "build" / "bin" / "llama-quantize", code)
    assert main([*command, "--llama-cpp", str(tmp_path / "llama.cpp")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["chats-q4_k_m.gguf"]
    assert (tmp_path / "out" / "chats-q4_k_m.gguf").read_bytes().endswith(b"Q4_K_M")


def test_other_architectures_need_llama_cpps_converter(tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    folder = model_folder(tiny, tmp_path / "model", Gemma2Config, head_dim=16)
    command = ["export", str(folder), "--to", "gguf", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "flatout does not write model type gemma2 (Gemma2ForCausalLM)" in capfd.readouterr().err
    converter = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    program(converter, CONVERTER)
    assert main([*command, "--llama-cpp", str(converter.parent)]) == 0
    assert "--outtype f32" in capfd.readouterr().err
    # the converter named no end of turn
    stop = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
    facts, tensors = read(tmp_path / "out")
    assert facts["tokenizer.ggml.eot_token_id"] == stop
    assert tensors["converted"].tolist() == [1.0, 2.0]
    program(converter, "pathlib.Path(sys.argv[3]).write_text('something else')")
    assert main([*command[:-1], str(tmp_path / "other"), "--llama-cpp", str(converter.parent)]) == 6
    assert "llama.cpp's converter wrote no GGUF file" in capfd.readouterr().err
    program(converter, "sys.exit('no such model')")
    assert main([*command[:-1], str(tmp_path / "again"), "--llama-cpp", str(converter.parent)]) == 6
    said = capfd.readouterr().err
    assert "no such model" in said
    assert "exit code 1" in said


@pytest.mark.parametrize("kind", ["byte fallback", "other split", "rope"])
def test_what_would_be_read_differently_is_refused(tiny, tmp_path, kind, capsys):
    settings = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}} if kind == "rope" else {}
    folder = model_folder(tiny, tmp_path / "model", LlamaConfig, **settings)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if kind == "byte fallback":
        tokenizer["model"]["byte_fallback"] = True
    elif kind == "other split":
        tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["export", str(folder), "--to", "gguf", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ("rope type dynamic" if kind == "rope" else "byte-level BPE") in said
    assert "--llama-cpp" in said


@pytest.mark.parametrize(
    "name", ["run", *(name if name == "llama" else pytest.param(name, marks=pytest.mark.exhaustive) for name in SHAPES)]
)
def test_llama_cpp_computes_the_same(tiny, run_dir, tmp_path, name):
    """llama.cpp itself, where it is installed: the same tokens, and the same probabilities of the next one."""
    llama = pytest.importorskip("xllamacpp")
    from urllib.request import Request, urlopen

    if name == "run":
        folder = tmp_path / "merged"
        assert main(["merge", str(run_dir), "--out", str(folder)]) == 0
    else:
        folder = model_folder(tiny, tmp_path / name, SHAPES[name][0], **SHAPES[name][1])
    command = ["export", str(folder), "--to", "gguf", "--quantize", "f32", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    settings = llama.CommonParams()
    settings.model.path = str(next((tmp_path / "out").glob("*.gguf")))
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.warmup = 256, 1, 0, False
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(settings)

    def call(path: str, **content: Any) -> Any:
        request = Request(server.listening_address + path, json.dumps(content).encode())
        return json.load(urlopen(request, timeout=60))

    text = "<|im_start|>user\nIt's 2026: what   is Größe?\n\n<|im_end|>"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer(text)["input_ids"]
    assert call("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] == token_ids
    answer = call("/completion", prompt=token_ids, n_predict=1, n_probs=10, temperature=0)
    top = answer["completion_probabilities"][0]["top_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
    assert [one["logprob"] for one in top] == pytest.approx([float(expected[one["id"]]) for one in top], abs=1e-4)
