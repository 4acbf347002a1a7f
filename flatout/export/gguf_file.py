"""A model as a GGUF file, by llama.cpp's `gguf` package: tensors under its names, and the facts that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flatout.errors import Fix, UsageError
from flatout.export.gguf_vocab import LLAMA_CPP, add_vocabulary

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
