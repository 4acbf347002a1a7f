"""Every language model of the installed transformers, tiny and random: how flatout trains it, and how exactly.

    python benchmarks/model_table.py [--only NAME ...] [--again] [--no-graphs] [--seconds 120]

Each model type of transformers' causal and image-text-to-text mappings gets a process of its own with a time limit.
Plain transformers, one document at a time in fp64 (fp32 where it has none), says whether the model trains at all and
what loss and gradients are true. Results go to benchmarks/results/models.json after each model, so a run continues
where it was stopped; docs/models.md is written from them at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from flatout.cli.main import main as command
from flatout.config.schema import LoraConfig, ModelConfig
from flatout.errors import FlatoutError, PackingError, UsageError, first_line
from flatout.models.arch_quirks import choose_layout
from flatout.models.blocks import decoder_layers, text_decoder
from flatout.models.experts.lora import expert_parameters
from flatout.models.load.auto_class import auto_class
from flatout.models.load.model import LoadedModel, Loading, load_model
from flatout.models.lora.layer import add_lora, freeze_unreached, lora_layers
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import Samples, flatten_samples
from flatout.models.rope import plain_rope
from flatout.models.selftest import prove_layout
from flatout.trainer.model_shape import read_shape

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/models.json", ROOT / "docs/models.md"
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
WHOLE = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
CPU = torch.device("cpu")
VOCAB_SIZE = 300
# beyond these, relative to plain transformers, a model does not count as trained: its eager attention takes softmax,
# and its rotary embeddings their cosines, in fp32
MOST_LOSS_ERROR, MOST_GRADIENT_ERROR, MOST_UPDATE_ERROR = 1e-6, 1e-5, 1e-5
# of the two steps of `flatout train`
RATE, EPSILON, DECAY = 1e-2, 1e-2, 0.1
# documents of the comparison, in tokens
LENGTHS = (5, 17, 1, 9, 12)
# set where a configuration has the field, and a value for it
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embedding_size": 32, "decoder_layers": 2, "encoder_layers": 2,
    "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "decoder_attention_heads": 4, "n_head": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
    "intermediate_size": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "n_inner": 48,
    "max_position_embeddings": 128, "rotary_dim": 8, "initializer_range": 0.2, "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0,
    "is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# of hybrids
_SMALL |= {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "n_groups": 1, "mamba_expand": 2, "mamba_d_ssm": 64, "ssm_state_size": 8, "state_size": 8,
    "mamba_dt_rank": 4,
    "time_step_rank": 4, "chunk_size": 16, "mamba_chunk_size": 16, "lru_width": 32, "attention_window_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24, "attention_hidden_size": 32, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
# of towers
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "mlp_dim": 48, "num_hidden_layers": 2, "depth": 2,
    "num_layers": 2, "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 4, "out_hidden_size": 32,
    "projection_dim": 32, "text_hidden_size": 32, "output_dim": 32, "llm_hidden_size": 32, "mm_hidden_size": 32,
    "encoder_layers": 2, "d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "head_dim": 8,
    "hidden_dim": 32, "ffn_dim": 48, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
_DROPOUT = (
    "dropout", "attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "activation_dropout", "residual_dropout", "router_jitter_noise",
    "input_jitter_noise",
)  # fmt: skip
_LATENT = {"num_key_value_heads": 4}
_BY_LAYER = {"layer_types": ["sliding_attention", "full_attention"]}
_PER_LAYER = {**_BY_LAYER, "num_hidden_layers": 2, "num_global_key_value_heads": 2,
              "per_layer_config": {"1": {"head_dim": 16}}}  # fmt: skip
# what the rules above get wrong, by type of the text model
CHANGES: dict[str, dict[str, Any]] = {
    "dots3_note_text": {**_LATENT, "per_layer_config": {}},
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v3",
            "deepseek_v32",
            "glm_moe_dsa",
            "hy_v4",
            "glm4_moe_lite",
            "minicpm3",
            "mistral4",
            "youtu",
        ),
        _LATENT,
    ),
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _PER_LAYER),
    "glm5_next_text": {
        **_LATENT,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "kimi_linear": {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4, "pad_token_id": 0},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
    },
    "dbrx": {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 128,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "dots1": {"num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
    },
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 24], "moe_num_experts": 4},
    "git": {
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "solar_open": {"intermediate_size": 48},
    "xlstm": {"autocast_kernel_dtype": "float32", "eps": 1e-12},
    "zaya": {"num_experts_per_tok": 1},
}
# text models that rotate by time, height and width, though their default configuration does not say so
_MROPE = ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")
_IDS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "vision_start_token_id",
        "vision_end_token_id", "image_token")  # fmt: skip


def model_types() -> list[str]:
    return sorted({*CAUSAL, *WHOLE})


def tiny(model_type: str) -> Any:
    """A small configuration, made by setting what the default one has. Raises what the configuration raises."""
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config()
    if text is default:
        return CONFIG_MAPPING[model_type](**_tiny_text(text))
    values: dict[str, Any] = {}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is text:
            values[name] = {**_tiny_text(text), "model_type": text.model_type}
        elif part is not None:
            known = part.to_dict()
            small = {key: value for key, value in _TOWER.items() if known.get(key) is not None}
            values[name] = {**small, "model_type": part.model_type}
    top = default.to_dict()
    values |= {key: VOCAB_SIZE - 1 - index for index, key in enumerate(_IDS) if isinstance(top.get(key), int)}
    values |= {key: 32 for key in ("hidden_size", "projection_dim", "projector_hidden_size") if top.get(key)}
    values |= CHANGES.get(model_type, {})
    name = {value for key, value in WHOLE.items() if key == model_type}
    return CONFIG_MAPPING[model_type](**values, architectures=sorted(name) or None)


def _tiny_text(text: Any) -> dict[str, Any]:
    given = text.to_dict()
    known = {*given, *text.attribute_map}
    values: dict[str, Any] = {"vocab_size": VOCAB_SIZE}
    values |= {name: value for name, value in _SMALL.items() if name in known and given.get(name, 0) is not None}
    values |= dict.fromkeys(known & set(_DROPOUT), 0.0)
    num_layers = getattr(text, "num_hidden_layers", None)
    kinds = given.get("layer_types")
    if kinds and len(kinds) == num_layers:
        # one layer of each kind, and at least two
        chosen = sorted({kinds.index(kind) for kind in kinds} | {0, 1})[:4]
        values["num_hidden_layers"] = len(chosen)
        for name, value in given.items():
            if isinstance(value, list) and len(value) == num_layers:
                values[name] = [value[index] for index in chosen]
    values |= CHANGES.get(text.model_type, {})
    rope = given.get("rope_parameters")
    if isinstance(rope, dict) and ("mrope_section" in rope or text.model_type.removesuffix("_text") in _MROPE):
        # a section for time, height and width, of half the rotated part of a head
        half = int(values["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2 if "head_dim" in values else 4
        values["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return values


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [(draw.integers(3, VOCAB_SIZE - 20, size), draw.random(size) < 0.6) for size in LENGTHS]


# what the command trains on: every document has a label
TRAINED = [(ids, mask | (np.arange(len(ids)) == len(ids) - 1)) for ids, mask in documents() if len(ids) > 1]


def plain_loss(model: PreTrainedModel, samples: Samples | None = None) -> torch.Tensor:
    """Return the summed loss by transformers' own attention, one document at a time."""
    for name in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(name)
        except ValueError:
            continue
        break
    total = torch.zeros((), dtype=model.dtype)
    with plain_rope(model):
        for ids, loss_mask in samples or documents():
            tokens = torch.from_numpy(ids)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            losses = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            total = total + losses[torch.from_numpy(loss_mask)[1:]].sum()
    return total


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([held.grad.flatten().double() for held in model.parameters() if held.grad is not None])


def why_not_trained(folder: Path) -> str | None:
    """Return why plain transformers cannot train this as a causal language model; None if it can."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    if model.config.is_encoder_decoder:
        return "an encoder-decoder"
    if model.get_output_embeddings() is None:
        return "no output head"
    grad = gradients(model, plain_loss(model))
    if not bool(grad.isfinite().all()) or not bool(grad.any()):
        return "gradients of plain transformers are zero or not finite"
    with torch.no_grad():
        tokens = torch.from_numpy(documents()[1][0])[None]
        changed = tokens.clone()
        changed[0, -1] += 1
        logits = [model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (tokens, changed)]
    if float((logits[0] - logits[1]).abs().max()) > 1e-4:
        return "not causal: a later token changes earlier logits"
    return None


def measure(model_type: str) -> dict[str, Any]:
    """Return the row of one model type: why it does not count, why it is refused, or how exactly it trains."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny(model_type).save_pretrained(folder)
            reason = why_not_trained(Path(folder))
        except Exception as error:  # noqa: BLE001  (configurations and models raise anything)
            reason = f"{type(error).__name__}: {first_line(error)}"
        if reason is not None:
            return {"counts": False, "reason": reason[:160]}
        try:
            try:
                return {"counts": True, "precision": "fp64", **_trained_exactly(folder, "fp64")}
            except (FlatoutError, RuntimeError) as error:
                # some layers are fp32 whatever the model is
                if not any(word in str(error) for word in ("dtype", "nan", "overflow")):
                    raise
                return {"counts": True, "precision": "fp32", **_trained_exactly(folder, "fp32")}
        except FlatoutError as refused:
            return {"counts": True, "refused": str(refused).replace(folder, "MODEL")[:240]}
        except Exception as error:  # noqa: BLE001  (a traceback is a result of this table too)
            return {"counts": True, "refused": f"TRACEBACK {type(error).__name__}: {first_line(error)}"[:240]}


def _trained_exactly(folder: str, precision: Any) -> dict[str, Any]:
    """Return what passes and commands measure, with why it is refused if one of them is not exact."""
    row = {**_trained(folder, precision), **_commanded(folder, precision)}
    slack = 1 if precision == "fp64" else 100
    limits = {"loss_error": MOST_LOSS_ERROR, "gradient_error": MOST_GRADIENT_ERROR,
              "step_loss_error": MOST_LOSS_ERROR, "update_error": MOST_UPDATE_ERROR}  # fmt: skip
    if off := {name: row[name] for name, limit in limits.items() if not row[name] <= slack * limit}:
        row["refused"] = "INEXACT: " + ", ".join(f"{name} {error:.0e}" for name, error in off.items())
    return row


def _commanded(folder: str, precision: Any) -> dict[str, Any]:
    """Run `flatout train` for two steps: full, LoRA, and LoRA of experts too.

    Compares the losses of the steps, and of full fine-tuning the change of all weights. Each step has all documents, in
    two micro-batches or more. Plain transformers takes the same steps with AdamW, whose `eps` keeps it from turning
    rounding of gradients near zero into whole steps; it skips what has no gradient. An adapter starts at zero, so that
    its first loss is the model's.
    """
    root, row = Path(folder, "command"), dict[str, Any]()
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    model = _write_inputs(Path(folder), root, dtype)
    plain, plain_losses = _plain_steps(model)
    kinds = ("full", "lora", "experts") if expert_parameters(model) else ("full", "lora")
    row["has_experts"] = "experts" in kinds
    for kind in kinds:
        run = root / kind
        (root / f"{kind}.yaml").write_text(json.dumps(_settings(folder, precision, root, kind)))
        code = command(["train", str(root / f"{kind}.yaml")])
        log = (run / "train.log").read_text().splitlines() if (run / "train.log").exists() else []
        why = "".join(log[-1:]).partition("why ")[2]
        if code and kind != "full" and why.startswith("lora.targets: "):
            row["no_adapter" if kind == "lora" else "no_experts"] = why
            continue
        if code:
            raise UsageError(f"flatout train, {kind}, ended with exit code {code}: {why}")
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses = [record["loss"] for record in records if record["kind"] == "step"]
        pairs = list(zip(losses, plain_losses, strict=True))[: 2 if kind == "full" else 1]
        row["step_loss_error"] = max(row.get("step_loss_error", 0.0), *(abs(a / b - 1) for a, b in pairs))
        if kind == "full":
            row["update_error"] = _update_error(model, plain, run / "checkpoints/step-2/model.safetensors")
    return row


def _settings(folder: str, precision: Any, root: Path, kind: str) -> dict[str, Any]:
    """Return the configuration of one run of the command."""
    targets = {"lora": "all-linear", "experts": ["all-linear", "experts"]}
    return {
        "run_dir": str(root / kind), "device": "cpu", "method": "full" if kind == "full" else "lora",
        "model": {"name": folder, "precision": precision},
        "data": {"sources": [{"path": str(root / "rows.jsonl")}], "root": str(root / "data"),
                 "tokenizer": str(root / "tokenizer")},
        "batch": {"samples_per_step": len(TRAINED), "micro_batch_tokens": 32, "max_steps": 2},
        "optim": {"lr": RATE, "eps": EPSILON, "weight_decay": DECAY, "max_grad_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0}, "eval": {"prompts": []}, "experts": {"balance_loss": 0},
        **({} if kind == "full" else {"lora": {"rank": 2, "targets": targets[kind]}}),
    }  # fmt: skip


def _write_inputs(folder: Path, root: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Write a model's weights, its token rows and a tokenizer; return the model in `dtype`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    model: PreTrainedModel = auto_class(config).from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    root.mkdir(exist_ok=True)
    rows = [
        {"input_ids": ids.tolist(), "labels": [int(i) if m else -100 for i, m in zip(ids, mask, strict=True)]}
        for ids, mask in TRAINED
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    tokenizer.save_pretrained(root / "tokenizer")
    return model.eval()


def _plain_steps(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return a model's weights after two steps of torch's AdamW, and the loss of each step."""
    model = copy.deepcopy(model)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) is yes], "weight_decay": yes * DECAY}
        for yes in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=EPSILON)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain_loss(model, TRAINED) / sum(int(mask[1:].sum()) for _, mask in TRAINED)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def _update_error(model: PreTrainedModel, plain: dict[str, torch.Tensor], checkpoint: Path) -> float:
    """Return how far a run's change of all weights is from plain transformers', relative to the latter's size."""
    saved = load_file(checkpoint)
    before = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    # what is not saved was not trained
    off = [saved.get(name, before[name]).double() - after.double() for name, after in plain.items()]
    moved = [after.double() - before[name] for name, after in plain.items()]
    return float(
        torch.stack([each.norm() for each in off]).norm() / torch.stack([each.norm() for each in moved]).norm()
    )


def _trained(folder: str, precision: Any) -> dict[str, Any]:
    shape = read_shape(folder, None)
    row: dict[str, Any] = {"layout": "", "loss_error": 0.0, "gradient_error": 0.0, "targets": []}
    for method in ("full", "lora"):
        loaded = _load(folder, method, precision)
        model = loaded.model.eval()
        row["layout"] = "rows" if loaded.is_padded else "packed"
        if method == "lora":
            try:
                add_lora(model, LoraConfig(rank=2), seed=0)
            except UsageError as refused:
                row["no_adapter"] = str(refused)
                continue
            row["targets"] = sorted({name.rpartition(".")[2] for name in lora_layers(model)})
            planned = shape.num_lora_params(LoraConfig(rank=2))
            trained = sum(held.numel() for held in model.parameters() if held.requires_grad)
            if planned != trained:
                raise UsageError(f"the plan counts {planned:,} adapter parameters, but {trained:,} are trained")
            for name, parameter in model.named_parameters():
                if name.endswith("lora_b"):
                    torch.nn.init.normal_(parameter.data, std=0.02)
        else:
            freeze_unreached(model)
        batch = flatten_samples(documents(), row_length=max(LENGTHS) if loaded.is_padded else None)
        ours = packed_cross_entropy(model, batch).loss_sum
        ours_grad = gradients(model, ours)
        truth = plain_loss(model)
        truth_grad = gradients(model, truth)
        row["loss_error"] = max(row["loss_error"], abs(ours.item() / truth.item() - 1))
        error = float((ours_grad - truth_grad).norm() / truth_grad.norm())
        row["gradient_error"] = max(row["gradient_error"], error)
    return row


def _load(folder: str, method: Any, precision: Any) -> LoadedModel:
    """Load and prove a model as training does, packed if that is exact and in rows otherwise."""
    config = ModelConfig(name=folder, init="random", precision=precision)
    text = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    rows = choose_layout(text, "auto").layout == "rows"
    while True:
        try:
            loaded = load_model(config, method=method, device=CPU, seed=0, how=Loading(is_padded=rows))
            return prove_layout(loaded, longest=max(LENGTHS), any_attention=True)[0]
        except PackingError:
            if rows:
                raise
            rows = True


def graph(model_type: str) -> str:
    """Return `yes` if every decoder layer is one graph for the compiler, else the reason; with transformers' attention,
    as ours for the CPU reads the documents' boundaries on the host."""
    import torch._dynamo

    config = tiny(model_type)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    torch._dynamo.reset()
    for layer in decoder_layers(model):
        layer.compile(backend="eager", fullgraph=True, dynamic=True)
    tokens = torch.from_numpy(documents()[1][0])[None]
    try:
        with torch.no_grad():
            text_decoder(model)(input_ids=tokens, use_cache=False)
    except Exception as error:  # noqa: BLE001  (the compiler raises anything)
        return f"{type(error).__name__}: {first_line(error)}"[:120]
    return "yes"


def run_apart(function: Callable[[str], Any], model_type: str, seconds: float) -> Any:
    """Return what a function returns in a forked process, or as text why it did not within `seconds`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sender.send(function(model_type))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return f"not done after {seconds:g} s"
        return receiver.recv()
    except EOFError:
        process.join()
        return f"the process ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def page(results: dict[str, Any]) -> str:
    """Return docs/models.md."""
    rows: dict[str, Any] = results["models"]
    counted = {name: row for name, row in rows.items() if row["counts"]}
    trained = {name: row for name, row in counted.items() if "refused" not in row}
    packed = sum(row["layout"] == "packed" for row in trained.values())
    num_earlier = sum("earlier" in row for row in rows.values())
    return "\n".join([
        "# Models",
        "",
        "This page shows whether flatout can train your model, and how closely it matches plain transformers.",
        "Look for your model's type: it is `model_type` in its `config.json`.",
        "",
        f"`python benchmarks/model_table.py` builds every language model of transformers {results['transformers']}",
        "with a tiny random config: all types of `AutoModelForCausalLM`, and the language models of",
        "`AutoModelForImageTextToText` with frozen vision towers. It compares flatout with plain transformers, one",
        "document at a time, in fp64 on the CPU, for full fine-tuning and LoRA on all linear layers.",
        "",
        f"flatout trains **{len(trained)} of {len(counted)}** models that transformers itself can train "
        f"({len(trained) / len(counted):.1%}): {packed} packed, {len(trained) - packed} in rows.",
        "",
        *(
            [
                f"{num_earlier} of these results are of an earlier commit (`earlier` in",
                "`benchmarks/results/models.json`); `--again` measures a model once more.",
                "",
            ]
            if num_earlier
            else []
        ),
        "* layout: documents are `packed` into one stream, or padded `rows` (`batch.layout`)",
        "* loss, gradient: the relative difference from plain transformers in one pass, for full fine-tuning or",
        "  LoRA, whichever is larger",
        "* steps: the relative difference between the weight changes of flatout and of plain transformers with torch's",
        "  AdamW, over two steps of full fine-tuning with weight decay. The losses of these steps, and of the first",
        "  step of `flatout train` with LoRA, differ by at most 1e-6. These runs include the self-test, the routers,",
        "  PEFT's check of the adapter and all saves.",
        "* graph: whether each decoder layer compiles to one graph; `?`: not measured; `no`: it does not, or tracing",
        "  takes too long",
        "* experts: whether `lora.targets: [all-linear, experts]` trains and PEFT reads the adapter; `-`: no fused",
        "  experts",
        "* adapters: the linear layers that `lora.targets: all-linear` matches, without 3-D expert tensors",
        "",
        "| model type | layout | loss | gradient | steps | graph | experts | adapters |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {row['layout']} | {row['loss_error']:.0e} | {row['gradient_error']:.0e} | "
            f"{row.get('update_error', math.nan):.0e} | {_graph(row)} | {_experts(row)} | {_adapters(row)} |"
            for name, row in trained.items()
        ),
        "",
        "## Adapters refused",
        "",
        "These models support full fine-tuning. With LoRA, the command gives this error before the first step:",
        "",
        "| model type | lora.targets | reason |",
        "|---|---|---|",
        *(
            f"| {name} | {targets} | {_cell(row[key])} |"
            for name, row in trained.items()
            for key, targets in (("no_adapter", "all-linear"), ("no_experts", "[all-linear, experts]"))
            if key in row
        ),
        "",
        "## Refused",
        "",
        "flatout could not train these models in our test; `flatout train` ends with an error before the first step.",
        "\"Not done after 300 s\" means that the test was stopped.",
        "",
        "| model type | reason |",
        "|---|---|",
        *(f"| {name} | {_cell(row['refused'])} |" for name, row in counted.items() if "refused" in row),
        "",
        "## Not counted",
        "",
        "These models are not causal language models, or transformers cannot train them with a tiny config on the CPU",
        "(for some, the script has no tiny config).",
        "",
        "| model type | reason |",
        "|---|---|",
        *(f"| {name} | {_cell(row['reason'])} |" for name, row in rows.items() if not row["counts"]),
        "",
    ])  # fmt: skip


def _graph(row: dict[str, Any]) -> str:
    return "?" if "graph" not in row else "yes" if row["graph"] == "yes" else "no"


def _experts(row: dict[str, Any]) -> str:
    return "no" if "no_experts" in row else "yes" if row.get("has_experts") else "-"


def _adapters(row: dict[str, Any]) -> str:
    return "refused" if "no_adapter" in row else ", ".join(row["targets"]) or "none"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=model_types(), help="model types to measure")
    parser.add_argument("--again", action="store_true", help="measure those that have a result too")
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="trace decoder layers too"
    )
    parser.add_argument("--seconds", type=float, default=120, help="time limit of one model")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    if results.get("transformers") != transformers.__version__:
        results = {"transformers": transformers.__version__, "models": {}}
    for name in args.only:
        if args.again or name not in results["models"]:
            row, before = run_apart(measure, name, args.seconds), results["models"].get(name, {})
            row = {"counts": True, "refused": row} if isinstance(row, str) else row
            results["models"][name] = row | ({"graph": before["graph"]} if "graph" in before else {})
        row = results["models"][name]
        if args.graphs and row["counts"] and "refused" not in row and (args.again or "graph" not in row):
            row["graph"] = run_apart(graph, name, args.seconds)
        print(name, json.dumps(row), flush=True)
        results["models"] = dict(sorted(results["models"].items()))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
