"""The demo with pictures: colored shapes and questions about them, and a tiny vision-language model that learns."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig

from flatout.config.schema import Config
from flatout.data.pictures.read import require_pillow
from flatout.data.prompt_file import read_prompts
from flatout.data.rows.formats.pictures import MARK
from flatout.demo.settings import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE, tiny_config
from flatout.demo.write import save_parts, train_tokenizer, write_once
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import encode_json
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.rollout.chat import Sampling, answer_all, prompt_ids

NUM_TRAIN, NUM_HELD_OUT = 5000, 200
# of the held-out questions that must be answered right
LEAST_RIGHT = 0.95
COLORS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 220, 60),
    "purple": (150, 60, 180), "white": (250, 250, 250),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
ANSWERS = {
    "What is shown?": "A {color} {shape}.",
    "What color is it?": "It is {color}.",
    "What shape is it?": "It is a {shape}.",
}
PICTURES_DIR = "pictures"
_SIDE, _SIZES = 32, (15, 26)
_VOCABULARY_SIZE, _WIDTH, _MAX_ANSWER_TOKENS = 400, 128, 16
_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_CHATML = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}{% endif %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


class Shape(NamedTuple):
    """A picture, a PNG file, with a question about it and the right answer."""

    content: bytes
    question: str
    answer: str


def sample_shapes(num: int, seed: int, *, held_out: bool) -> Iterator[Shape]:
    """Yield `num` pictures of one shape each, of any size and place on a dark ground: a function of the arguments."""
    random = Random(f"flatout demo shapes {seed} {held_out}")
    for _ in range(num):
        color, shape, question = random.choice(tuple(COLORS)), random.choice(SHAPES), random.choice(tuple(ANSWERS))
        yield Shape(_drawn(color, shape, random), question, ANSWERS[question].format(color=color, shape=shape))


def _drawn(color: str, shape: str, random: Random) -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_SIDE, _SIDE), tuple(random.randint(0, 60) for _ in range(3)))
    size, pen = random.randint(*_SIZES), ImageDraw.Draw(image)
    left, top = (random.randint(1, _SIDE - size - 1) for _ in range(2))
    fill = tuple(min(255, max(0, value + random.randint(-20, 20))) for value in COLORS[color])
    right, bottom = left + size, top + size
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    else:
        pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=fill)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def write_shapes(folder: Path, seed: int) -> None:
    """Write rows with their pictures, held-out questions with pictures beside them, a tokenizer and a tiny model.

    Raises UsageError as `write_once` does, and without Pillow.
    """
    require_pillow()
    DurableIO().make_dir(folder / PICTURES_DIR)
    rows, asked = list[dict[str, Any]](), list[dict[str, Any]]()
    for one in sample_shapes(NUM_TRAIN, seed, held_out=False):
        turns = [{"role": "user", "content": f"<image>{one.question}"}, {"role": "assistant", "content": one.answer}]
        uri = f"data:image/png;base64,{base64.b64encode(one.content).decode()}"
        rows.append({"messages": turns, "images": [uri]})
    for number, one in enumerate(sample_shapes(NUM_HELD_OUT, seed, held_out=True)):
        path = f"{PICTURES_DIR}/{number:03}.png"
        write_once(folder / path, one.content)
        asked.append({"prompt": one.question, "images": [path], "answer": one.answer})
    for name, listed in ((TRAIN_FILE, rows), (HELD_OUT_FILE, asked)):
        write_once(folder / name, "".join(json.dumps(row) + "\n" for row in listed).encode())
    texts = [f"{turn['role']} {turn['content']}" for row in rows for turn in row["messages"]]
    _write_model(folder / MODEL_DIR, train_tokenizer(texts, _VOCABULARY_SIZE))


def _write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the config of a tiny Qwen2.5-VL without weights, and what reads pictures for it.

    Its random tower stays as it is: a patch has 96 numbers, and a random layer of 64 keeps enough of them for the
    decoder to learn colors and shapes from.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = _CHATML
    start, picture, end, video = tokenizer.convert_tokens_to_ids(list(_TOKENS))
    text = {
        "vocab_size": len(tokenizer), "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True, "initializer_range": 0.088, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": _WIDTH, "intermediate_size": 128, "window_size": 32,
        "fullatt_block_indexes": [0], "initializer_range": 0.1,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=picture, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )  # fmt: skip
    ends = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    images: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": _SIDE**2},
    }  # fmt: skip
    processor = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": images}
    save_parts(folder, (config, ends, tokenizer))
    write_once(folder / "processor_config.json", encode_json(processor))


def shapes_config(folder: Path, seed: int) -> Config:
    """Return the configuration: full training of the decoder from random weights, six passes over the pictures."""
    return tiny_config(folder, seed, {"samples_per_step": 32, "epochs": 6}, {"fraction": 0.02, "every_steps": 300})


class Seen(NamedTuple):
    """A held-out question about a picture, the trained model's answer, and whether it is right."""

    question: str
    answer: str
    right: bool


def answer_shapes(run_dir: Path, folder: Path) -> list[Seen]:
    """Load the finished run as `flatout chat` does, and answer all held-out questions, greedily."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_trained(resolve_model_paths(str(run_dir)), device=device)
    prompts = read_prompts(folder / HELD_OUT_FILE, max_bytes=1 << 20)
    ids = [prompt_ids(model, tokenizer, prompt.messages, prompt.pictures) for prompt in prompts]
    greedy = Sampling(temperature=0.0)
    texts = answer_all(model, tokenizer, ids, max_new_tokens=_MAX_ANSWER_TOKENS, sampling=greedy)
    return [Seen(p.text.removeprefix(MARK), text, text in p.accepted) for p, text in zip(prompts, texts, strict=True)]
