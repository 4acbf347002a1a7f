"""Tiny shapes of vision-language families, each with what transformers' processor needs of tokenizer and template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

Ids = Callable[[str], int]

TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)), "<img>", "</img>", "<IMG_CONTEXT>",
    "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL", "<imgpad>",
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>",
    "<IMG_END>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<|audio|>",
]  # fmt: skip
_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": None,
}  # fmt: skip
_TOWER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}MARK"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as SmolVLM writes it: every content is a list of parts
_ALWAYS_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>Assistant:{% endif %}"
)
# as LLaVA-OneVision writes it: pictures first, then texts
_PICTURES_FIRST = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """The classes of config and processor, the template, and what returns the values of config and image processor.

    `fields` are the processor's own values, `tokens` the tokenizer's named tokens. `layouts` are those that the family
    can be trained in on a CPU; the processor needs the package `needs`, and the model transformers from `since` on.
    `limit` is of the relative difference of losses in fp64.
    """

    config: str
    processor: str
    template: str
    make: Callable[[Ids], tuple[dict[str, Any], dict[str, Any]]]
    fields: dict[str, Any] = {}  # noqa: RUF012
    tokens: dict[str, str] = {}  # noqa: RUF012
    layouts: tuple[str, ...] = ("packed", "rows")
    needs: str | None = None
    limit: float = 1e-12
    since: str = "5.17"


def _marked(mark: str) -> str:
    return _PARTS.replace("MARK", mark)


def qwen(config_class: str, **of_text: Any) -> Callable[[Ids], tuple[dict[str, Any], dict[str, Any]]]:
    """Return what makes the config and the processor of a family of Qwen's."""

    def make(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
        vision: dict[str, Any] = {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "out_hidden_size": 32, "intermediate_size": 32,
        }  # fmt: skip
        if config_class == "Qwen2_5_VLConfig":
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        elif config_class == "Qwen2VLConfig":
            vision = {
                "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_patch_size": 2,
            }  # fmt: skip
        elif config_class in ("Glm4vConfig", "Glm46VConfig"):
            vision |= {"image_size": 32}
        else:
            vision |= {"num_position_embeddings": 64}
            if not config_class.startswith("Qwen3_5"):
                vision |= {"deepstack_visual_indexes": [0, 1]}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        text = {**_TEXT, "rope_parameters": rope, "head_dim": 8, **of_text}
        config = {
            "text_config": text, "vision_config": vision, "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"), "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
        }  # fmt: skip
        name = "Qwen2VL"
        if config_class in ("Glm4vConfig", "Glm46VConfig"):
            name = config_class.removesuffix("Config")
            config |= {
                "image_token_id": ids("<|image|>"), "video_token_id": ids("<|video|>"),
                "image_start_token_id": ids("<|begin_of_image|>"), "image_end_token_id": ids("<|end_of_image|>"),
                "video_start_token_id": ids("<|begin_of_video|>"), "video_end_token_id": ids("<|end_of_video|>"),
            }  # fmt: skip
        images = {
            "image_processor_type": f"{name}ImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 1024},
        }  # fmt: skip
        if name != "Qwen2VL":
            images["size"] = {"shortest_edge": 128, "longest_edge": 2048}
        return config, images

    return make


def _onevision(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
    pins = [[16, 16], [16, 32], [32, 16], [32, 32]]
    config = {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_id": ids("<image>"), "video_token_id": ids("<video>"), "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1, "image_grid_pinpoints": pins, "vision_aspect_ratio": "anyres_max_9",
    }  # fmt: skip
    images = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 16, "width": 16},
        "image_grid_pinpoints": pins,
    }  # fmt: skip
    return config, images


def llava(kind: str) -> Callable[[Ids], tuple[dict[str, Any], dict[str, Any]]]:
    """Return what makes a family of LLaVA's with CLIP's tower."""

    def make(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
        config: dict[str, Any] = {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": ids("<image>"), "vision_feature_layer": -2, "image_seq_length": 16,
        }  # fmt: skip
        images: dict[str, Any] = {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        }  # fmt: skip
        if kind == "next":
            pins = [[16, 32], [32, 16], [32, 32]]
            config["image_grid_pinpoints"] = pins
            images |= {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": pins}
        if kind == "vip":
            config["vision_feature_layer"] = [-2, -1]
        return config, images

    return make


def idefics(kind: str) -> Callable[[Ids], tuple[dict[str, Any], dict[str, Any]]]:
    """Return what makes Idefics3 or SmolVLM."""

    def make(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
        config = {
            "text_config": {**_TEXT, "model_type": "llama", "pad_token_id": 0}, "vision_config": dict(_TOWER),
            "image_token_id": ids("<image>"), "scale_factor": 2, "pad_token_id": 0,
        }  # fmt: skip
        images = {
            "image_processor_type": f"{kind}ImageProcessor", "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        }  # fmt: skip
        return config, images

    return make


def _internvl(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8},
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": ids("<IMG_CONTEXT>"), "image_seq_length": 4, "downsample_ratio": 0.5,
    }  # fmt: skip
    images = {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "crop_to_patches": True,
        "min_patches": 1, "max_patches": 4,
    }  # fmt: skip
    return config, images


def _aya(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        "text_config": {**_TEXT, "model_type": "cohere2", "head_dim": 8, "sliding_window": 64},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": ids("<|IMG_PATCH|>"), "downsample_factor": 2,
    }  # fmt: skip
    images = {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "crop_to_patches": True,
        "min_patches": 1, "max_patches": 4,
    }  # fmt: skip
    return config, images


def _ovis(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "hidden_size": 32,
        "vision_config": {**_TOWER, "vocab_size": 64, "hidden_stride": 2},
        "image_token_id": ids("<IMG_ATOM>"),
        "visual_indicator_token_ids": [ids(f"<IMG_{name}>") for name in ("START", "GRID", "COL", "ROW", "END")],
    }  # fmt: skip
    images = {"image_processor_type": "Ovis2ImageProcessor", "size": {"height": 16, "width": 16},
              "min_patches": 1, "max_patches": 4, "crop_to_patches": True}  # fmt: skip
    return config, images


def gemma(kind: str) -> Callable[[Ids], tuple[dict[str, Any], dict[str, Any]]]:
    """Return what makes Gemma 3 or 4, which attend in both directions inside a picture."""

    def make(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
        text = {
            **_TEXT, "head_dim": 8, "sliding_window": 32, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }  # fmt: skip
        if kind == "3":
            config = {
                "text_config": text,
                "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
                "mm_tokens_per_image": 4, "image_token_index": ids("<image_soft_token>"),
                "boi_token_index": ids("<start_of_image>"), "eoi_token_index": ids("<end_of_image>"),
            }  # fmt: skip
            return config, {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
        text |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "global_head_dim": 8}
        text.pop("query_pre_attn_scalar")
        vision = {
            **_TOWER, "head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 64,
        }  # fmt: skip
        del vision["image_size"]
        config = {
            "text_config": text, "vision_config": vision, "audio_config": None, "image_token_id": ids("<|image|>"),
            "boi_token_id": ids("<start_of_image>"), "eoi_token_id": ids("<end_of_image>"),
            "video_token_id": ids("<|video|>"), "audio_token_id": ids("<|audio|>"),
        }  # fmt: skip
        images = {
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70,
            "pooling_kernel_size": 2,
        }  # fmt: skip
        return config, images

    return make


def _paddle(ids: Ids) -> tuple[dict[str, Any], dict[str, Any]]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = {
        "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": rope},
        "vision_config": {**_TOWER, "image_size": 32, "spatial_merge_size": 2}, "image_token_id": ids("<image>"),
        "video_token_id": ids("<video>"), "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }  # fmt: skip
    images = {
        "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 1,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    }  # fmt: skip
    return config, images


_QWEN = _marked("<|vision_start|><|image_pad|><|vision_end|>")
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_INTERNVL = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
FAMILIES = {
    "qwen2_5_vl": Family("Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", _QWEN, qwen("Qwen2_5_VLConfig")),
    "qwen3_vl": Family("Qwen3VLConfig", "Qwen3VLProcessor", _QWEN, qwen("Qwen3VLConfig")),
    "llava_onevision": Family(
        "LlavaOnevisionConfig", "LlavaOnevisionProcessor", _PICTURES_FIRST, _onevision,
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": Family("Idefics3Config", "Idefics3Processor", _ALWAYS_PARTS, idefics("Idefics3"), {"image_seq_len": 4}),
    "qwen2_vl": Family("Qwen2VLConfig", "Qwen2VLProcessor", _QWEN, qwen("Qwen2VLConfig")),
    "qwen3_vl_moe": Family("Qwen3VLMoeConfig", "Qwen3VLProcessor", _QWEN, qwen("Qwen3VLMoeConfig", **_MOE)),
    # its delta rule computes in fp32
    "qwen3_5": Family(
        "Qwen3_5Config", "Qwen3VLProcessor", _QWEN, qwen("Qwen3_5Config", **_HYBRID), layouts=("rows",), limit=1e-6
    ),
    "smolvlm": Family(
        "SmolVLMConfig", "SmolVLMProcessor", _ALWAYS_PARTS, idefics("SmolVLM"), {"image_seq_len": 4}, needs="num2words"
    ),
    "llava": Family(
        "LlavaConfig", "LlavaProcessor", _marked("<image>\n"), llava(""),
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Family(
        "LlavaNextConfig", "LlavaNextProcessor", _marked("<image>\n"), llava("next"),
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "vipllava": Family(
        "VipLlavaConfig", "LlavaProcessor", _marked("<image>\n"), llava("vip"),
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        since="5.20",
    ),
    "internvl": Family(
        "InternVLConfig", "InternVLProcessor", _marked("<IMG_CONTEXT>\n"), _internvl, {"image_seq_length": 4}, _INTERNVL
    ),
    "aya_vision": Family(
        "AyaVisionConfig", "AyaVisionProcessor", _marked("<image>"), _aya,
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
    ),
    "ovis2": Family("Ovis2Config", "Ovis2Processor", _marked("<image>"), _ovis, {"image_seq_length": 4}),
    "gemma3": Family(
        "Gemma3Config", "Gemma3Processor", _marked("<start_of_image>"), gemma("3"), {"image_seq_length": 4},
        {**_GEMMA, "image_token": "<image_soft_token>"}, ("rows",),
    ),
    "gemma4": Family(
        "Gemma4Config", "Gemma4Processor", _marked("<|image|>"), gemma("4"), {},
        {**_GEMMA, "image_token": "<|image|>", "audio_token": "<|audio|>", "boa_token": "[IMG_BREAK]",
         "eoa_token": "[IMG_END]"}, ("rows",), None, 1e-7,
    ),
    "glm4v": Family(
        "Glm4vConfig", "Glm4vProcessor", _marked("<|begin_of_image|><|image|><|end_of_image|>"), qwen("Glm4vConfig")
    ),
    "glm46v": Family(
        "Glm46VConfig", "Glm46VProcessor", _marked("<|begin_of_image|><|image|><|end_of_image|>"), qwen("Glm46VConfig")
    ),
    "paddleocr_vl": Family(
        "PaddleOCRVLConfig", "PaddleOCRVLProcessor", _marked("<|vision_start|><image><|vision_end|>"), _paddle, {},
        {"image_token": "<image>"},
    ),
}  # fmt: skip
# the families that most tests read
BY_DEFAULT = ("qwen2_5_vl", "qwen3_vl", "llava_onevision", "idefics3")
SOME_FAMILIES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.exhaustive) for name in FAMILIES]
"""All, of which four run without `-m exhaustive`."""
