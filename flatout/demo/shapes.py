"""The demo with pictures: colored shapes and questions about them, and a tiny vision-language model that learns."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig

from flatout.config.schema import Config
from flatout.data.pictures.read import require_pillow
from flatout.demo.settings import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE, tiny_config
from flatout.demo.write import MODELS, save_model, train_tokenizer, write_once, write_rows
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import encode_json

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
_VOCABULARY_SIZE = 400
_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


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
    write_rows(folder / TRAIN_FILE, rows)
    write_rows(folder / HELD_OUT_FILE, asked)
    texts = [f"{turn['role']} {turn['content']}" for row in rows for turn in row["messages"]]
    _write_model(folder / MODEL_DIR, train_tokenizer(texts, _VOCABULARY_SIZE))


def _write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = MODELS["chatml of pictures"]
    start, picture, end, video = tokenizer.convert_tokens_to_ids(list(_TOKENS))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = MODELS["pictures"]
    text = model["text_config"] | {"vocab_size": len(tokenizer), **ends}
    tokens = {"image_token_id": picture, "video_token_id": video, "vision_start_token_id": start}
    config = Qwen2_5_VLConfig(**model | {"text_config": text}, **tokens, vision_end_token_id=end)
    save_model(folder, config, tokenizer)
    write_once(folder / "processor_config.json", encode_json(MODELS["processor"]))


def shapes_config(folder: Path, seed: int) -> Config:
    """Return the configuration: full training of the decoder from random weights, six passes over the pictures."""
    return tiny_config(folder, seed, {"samples_per_step": 32, "epochs": 6}, {"fraction": 0.02, "every_steps": 300})
