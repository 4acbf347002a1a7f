"""Tiny vision-language models with tokenizer, image processor and template, and rows with pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures need Pillow")

NUM_STEPS, PER_STEP, LR = 4, 6, 1e-2
WORDS = "user assistant system what is shown the picture shows a red square two pictures yes no \n"
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)), "<img>", "</img>", "<IMG_CONTEXT>",
]  # fmt: skip
_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": None,
}  # fmt: skip
# the same with heads as wide as kernels of GPUs want them
_WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
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


def make_tokenizer(template: str) -> Any:
    """A byte-level BPE with the special tokens of all families."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator([WORDS] * 5, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def qwen_parts(config_class: str) -> Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]:
    """Return what makes the config and the processor of a family of Qwen's."""

    def make(ids: Callable[[str], int]) -> tuple[dict[str, Any], dict[str, Any]]:
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
        else:
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        text = {**_TEXT, "rope_parameters": rope, "head_dim": 8}
        config = {
            "text_config": text, "vision_config": vision, "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"), "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
        }  # fmt: skip
        images = {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 1024},
        }  # fmt: skip
        return config, images

    return make


def _onevision(ids: Callable[[str], int]) -> tuple[dict[str, Any], dict[str, Any]]:
    pins = [[16, 16], [16, 32], [32, 16], [32, 32]]
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    config = {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": vision, "image_token_id": ids("<image>"),
        "video_token_id": ids("<video>"), "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
        "image_grid_pinpoints": pins, "vision_aspect_ratio": "anyres_max_9",
    }  # fmt: skip
    images = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 16, "width": 16},
        "image_grid_pinpoints": pins,
    }  # fmt: skip
    return config, images


def _idefics(ids: Callable[[str], int]) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    config = {
        "text_config": {**_TEXT, "model_type": "llama", "pad_token_id": 0}, "vision_config": vision,
        "image_token_id": ids("<image>"), "scale_factor": 2, "pad_token_id": 0,
    }  # fmt: skip
    images = {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    }  # fmt: skip
    return config, images


# family -> config class, processor class and its own fields, template, what makes config and image processor
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str, Any]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", {},
        _PARTS.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"), qwen_parts("Qwen2_5_VLConfig"),
    ),
    "qwen3_vl": (
        "Qwen3VLConfig", "Qwen3VLProcessor", {},
        _PARTS.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"), qwen_parts("Qwen3VLConfig"),
    ),
    "llava_onevision": (
        "LlavaOnevisionConfig", "LlavaOnevisionProcessor",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}, _PICTURES_FIRST, _onevision,
    ),
    "idefics3": ("Idefics3Config", "Idefics3Processor", {"image_seq_len": 4}, _ALWAYS_PARTS, _idefics),
}  # fmt: skip


def make_reader(folder: Path, family: str) -> Any:
    """Write the tokenizer and the processor of a family; return the values of its model's config."""
    _, processor_class, fields, template, make = FAMILIES[family]
    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(folder)
    values, images = make(tokenizer.convert_tokens_to_ids)
    written = {"processor_class": processor_class, **fields, "image_processor": images}
    (folder / "processor_config.json").write_text(json.dumps(written))
    values["text_config"] = {**values["text_config"], "vocab_size": len(tokenizer), "eos_token_id": 2}
    return values | {"tie_word_embeddings": False}


def make_picture_model(folder: Path, family: str, *, wide: bool = False) -> Path:
    """Write a random model of a family, with all that comes with one, into a folder.

    Its weights are numbers of bf16, so that a precision changes nothing but products; with `wide`, its heads are as
    kernels of GPUs want them.
    """
    import torch
    import transformers

    values = make_reader(folder, family)
    if wide:
        values = widened(values)
    config = getattr(transformers, FAMILIES[family][0])(**values)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # norms and embeddings too, so that nothing hides in a small number
        spread = min(0.2, 1.2 / parameter[0].numel() ** 0.5)  # wider layers do not amplify rounding
        torch.nn.init.normal_(parameter, *((0, spread) if parameter.ndim > 1 else (1, 0.1)))
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    return folder


def widened(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with a wider decoder of texts, and what else has its width."""
    text, vision = {**values["text_config"], **_WIDE}, dict(values["vision_config"])
    if rope := text.get("rope_parameters"):
        text["rope_parameters"] = {**rope, "mrope_section": [16, 8, 8]}
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = _WIDE["hidden_size"]
    return {**values, "text_config": text, "vision_config": vision}


def draw(height: int, width: int, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    """Return the file of a picture of random blocks."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


SIZES = ((20, 30), (33, 17), (16, 16), (48, 24), (9, 40), (25, 25))


def write_rows(folder: Path) -> Path:
    """Write a file of rows: texts only, one picture, several pictures in several turns; and the pictures beside it."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number, (height, width) in enumerate(SIZES):
        (folder / "pictures" / f"{number}.png").write_bytes(draw(height, width, number))

    def part(number: int) -> dict[str, str]:
        return {"type": "image", "path": f"pictures/{number % len(SIZES)}.png"}

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    rows = list[list[dict[str, Any]]]()
    for number in range(12):
        rows.append([
            {"role": "user", "content": [part(number), text(f"what is shown {number}?")]},
            {"role": "assistant", "content": f"a red square {number} is shown"},
        ])  # fmt: skip
        rows.append([
            {"role": "user", "content": f"is it {number}?"}, {"role": "assistant", "content": f"yes it is {number}"},
        ])  # fmt: skip
        if number % 3 == 0:
            rows.append([
                {"role": "user", "content": [text("two "), part(number + 1), text(" and "), part(number + 2)]},
                {"role": "assistant", "content": "the pictures"},
                {"role": "user", "content": [text("this? "), part(number + 3)]},
                {"role": "assistant", "content": "a square, and no more"},
            ])  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


class PictureWorld:
    """Rows with pictures in a folder, and the models of families, each made when it is first asked for."""

    def __init__(self, root: Path, *, wide: bool = False) -> None:
        self.root, self.rows, self._wide = root, write_rows(root), wide
        self._models: dict[str, Path] = {}

    def model(self, family: str) -> Path:
        if family not in self._models:
            self._models[family] = make_picture_model(self.root / family, family, wide=self._wide)
        return self._models[family]

    def config(self, family: str, run_dir: Path, **sections: Any) -> Any:
        """The config of a run of NUM_STEPS steps over the rows, in fp64 on a CPU; sections go on top."""
        from flatout.config.read import make_config

        values: dict[str, Any] = {
            "run_dir": str(run_dir),
            "device": "cpu",
            "seed": 3,
            "model": {"name": str(self.model(family)), "precision": "fp64"},
            "data": {"name": family, "root": str(self.root / "data"), "sources": [{"path": str(self.rows)}],
                     "num_procs": 1},
            "lora": {"rank": 4, "alpha": 8},
            "batch": {"samples_per_step": PER_STEP, "micro_batch_tokens": 300, "max_steps": NUM_STEPS},
            "optim": {"lr": LR, "weight_decay": 0.01},
            "schedule": {"kind": "linear", "warmup_steps": 0},
            "checkpoint": {"every_steps": None},
            "eval": {"prompts": []},
        }  # fmt: skip
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        return make_config(values, [])
