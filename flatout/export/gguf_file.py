"""A model as a GGUF file, by llama.cpp's `gguf` package: tensors and vocabulary under its names, and further facts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flatout.errors import Fix, UsageError

# class of transformers: llama.cpp's name; others have parts that need more than other names
ARCHS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# what the gguf package encodes itself, and the code of a whole file of it
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
LLAMA_CPP = Fix({"--llama-cpp": "FOLDER"}, "llama.cpp, which you install")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = "ByteLevel"
# how a tokenizer splits text before BPE, and whether whole words that are tokens are never split: llama.cpp's name
_SPLITS = {
    ((_GPT2,), False): "gpt-2",
    (("Digits", _GPT2), False): "smollm",
    ((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), False): "qwen2",
    ((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), True): "llama-bpe",
    (
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        True,
    ): "tekken",
}


def why_not(model: PreTrainedModel) -> str | None:
    """Return why this file does not write a model, in words for a sentence; None if it does."""
    config, name = model.config, type(model).__name__
    if name not in ARCHS:
        return f"model type {config.model_type} ({name})"
    rope = config.rope_parameters
    kind, keys = rope["rope_type"], {key for key, value in rope.items() if value is not None}
    if odd := sorted(keys - {"rope_type", "rope_theta"} - _ROPE_KEYS.get(kind, set())):
        return f"rope type {kind} with {', '.join(odd)}"
    if kind not in _ROPE_KEYS or (kind == "llama3" and ARCHS[name] != "llama"):
        return f"rope type {kind} of {name}"
    return None if config.hidden_act == "silu" else f"hidden_act {config.hidden_act}"


def write_gguf(
    model: PreTrainedModel, tokenizer: Any, file: Path, *, name: str, kind: str, stop_ids: Sequence[int]
) -> None:
    """Write a merged model and its tokenizer to a GGUF file; `kind` is one of FILE_TYPES,
    `stop_ids` the tokens that end an answer.

    Matrices are encoded as `kind` (f16 if their rows do not divide into its blocks), vectors in f32. One tensor at a
    time is encoded. Raises UsageError for a model or tokenizer of an unknown kind, and for weights beyond fp16.
    """
    import gguf

    if (reason := why_not(model)) is not None:
        raise UsageError(f"GGUF: flatout does not write {reason}", [LLAMA_CPP])
    writer = gguf.GGUFWriter(file, ARCHS[type(model).__name__])
    add_vocabulary(writer, tokenizer, model.config.vocab_size, stop_ids)
    _add_facts(writer, model, name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    tensors = list(_tensors(model))
    for gguf_name, tensor in tensors:
        wanted = _encoding(tensor, kind)
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, wanted)
        num_bytes = torch.Size(shape).numel()
        writer.add_tensor_info(gguf_name, shape, torch.empty(0, dtype=torch.uint8).numpy().dtype, num_bytes, wanted)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for gguf_name, tensor in tensors:
            writer.write_tensor_data(_encode(gguf_name, tensor, _encoding(tensor, kind)))
    finally:
        writer.close()


def _add_facts(writer: Any, model: PreTrainedModel, name: str) -> None:
    import gguf

    config, rope, sampling = model.config, model.config.rope_parameters, model.generation_config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    # llama.cpp has no window for these: up to its length, attention is the same
    windows = {"sliding_attention"} & set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if windows or config.model_type == "mistral" else None
    writer.add_context_length(min(config.max_position_embeddings, window or config.max_position_embeddings))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if sampling is not None and sampling.do_sample:
        for key, add in (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p")):
            if (value := getattr(sampling, key)) is not None:
                getattr(writer, f"add_sampling_{add}")(value)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield llama.cpp's name and layout of every weight: rows of q and k in pairs for rope, tied weights once."""
    import gguf

    config, arch = model.config, ARCHS[type(model).__name__]
    arch_id = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise UsageError(f"GGUF: {arch} has no name for {name}", [LLAMA_CPP])
        leaf = name.split(".")[-2]
        if arch == "llama" and leaf in heads:
            pairs = tensor.reshape(heads[leaf], 2, -1, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        yield gguf_name, tensor
    if config.rope_parameters["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq.double()
        places = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
        yield "rope_freqs.weight", (config.rope_parameters["rope_theta"] ** -places / scaled).float()


def _encoding(tensor: torch.Tensor, kind: str) -> Any:
    import gguf

    if tensor.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    return gguf.GGMLQuantizationType.F16 if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def _encode(name: str, tensor: torch.Tensor, wanted: Any) -> Any:
    """Return a tensor's bytes as a numpy array."""
    import gguf

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if wanted.name not in dtypes:
        return gguf.quants.quantize(tensor.float().cpu().numpy(), wanted)
    cast = tensor.to("cpu", dtypes[wanted.name]).contiguous()
    if not bool(cast.isfinite().all()) and bool(tensor.isfinite().all()):
        raise UsageError(f"GGUF: {name} has values beyond fp16's range", [Fix({"--quantize": "bf16"})])
    return cast.view(torch.uint8).numpy()


def add_vocabulary(writer: Any, tokenizer: Any, num_rows: int, stop_ids: Sequence[int]) -> None:
    """Add a byte-level BPE vocabulary with its merges, special tokens and chat template to a gguf.GGUFWriter.

    `num_rows` are the rows of the embedding, of which the last may have no token; `stop_ids` end an answer. Raises
    UsageError for a tokenizer of another kind, or one that splits text in a way that has no name known here.
    """
    import gguf

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    split = _name_of_split(content)
    if len(tokenizer) > num_rows:
        raise UsageError(f"the tokenizer has {len(tokenizer):,} tokens, but the model's embedding only {num_rows:,}")
    texts = {token_id: text for text, token_id in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    kinds = [gguf.TokenType.NORMAL if row in texts else gguf.TokenType.UNUSED for row in range(num_rows)]
    for row, token in added.items():
        texts[row] = token["content"]
        kinds[row] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([texts.get(row, f"[PAD{row}]") for row in range(num_rows)])
    writer.add_token_types(kinds)
    merges = content["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    for name in ("bos", "eos", "unk", "pad"):
        if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    for field, token_id in stop_fields(tokenizer, stop_ids).items():
        getattr(writer, f"add_{field}_token_id")(token_id)
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(encoded[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def stop_fields(tokenizer: Any, stop_ids: Sequence[int]) -> dict[str, int]:
    """Return the fields that hold tokens that end an answer, beside a tokenizer's own end token.

    llama.cpp stops at the tokens of three fields: eos, eot and eom. The first of `stop_ids` always has one.
    """
    others = [token_id for token_id in stop_ids if token_id != tokenizer.eos_token_id]
    if tokenizer.eos_token_id is None and others:
        return dict(zip(("eos", "eot", "eom"), others, strict=False))
    # programs that know eot only find it, too, where it is the end token, and no other token needs the field
    first = stop_ids[:1] if stop_ids[:1] == [tokenizer.eos_token_id] and len(others) < 2 else []
    return dict(zip(("eot", "eom"), [*first, *others], strict=False))


def stops_left_out(tokenizer: Any, stop_ids: Sequence[int]) -> list[str]:
    """Return the tokens that end an answer and have no field, so that llama.cpp goes on behind them."""
    known_stops = {*stop_fields(tokenizer, stop_ids).values(), tokenizer.eos_token_id}
    return [str(tokenizer.decode([token_id])) for token_id in stop_ids if token_id not in known_stops]


def _name_of_split(content: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer.json splits text. Raises UsageError without one."""
    model, parts = content["model"], content["pre_tokenizer"] or {}
    words: list[str] = []
    is_plain = model["type"] == "BPE" and not model.get("byte_fallback") and not model.get("continuing_subword_prefix")
    is_plain = is_plain and (content["normalizer"] or {"type": "NFC"})["type"] == "NFC"
    for part in parts.get("pretokenizers", [parts]):
        if part.get("type") == "Split":
            is_plain = is_plain and part["behavior"] == "Isolated" and not part["invert"]
            words.append(part["pattern"].get("Regex", "other"))
        elif part.get("type") == "ByteLevel":
            is_plain = is_plain and not part["add_prefix_space"]
            words += ["ByteLevel"] if part["use_regex"] else []
        else:
            words.append(str(part.get("type")) if part.get("individual_digits", True) else "other")
    name = _SPLITS.get((tuple(words), bool(model.get("ignore_merges")))) if is_plain else None
    if name is None:
        raise UsageError(
            "GGUF: flatout writes the byte-level BPE tokenizers of GPT-2, Llama 3, Qwen2, Qwen3, SmolLM and Mistral "
            f"NeMo, but this one is another ({model['type']}, split by {', '.join(words)[:60] or 'nothing'})",
            [LLAMA_CPP],
        )
    return name
