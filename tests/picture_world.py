"""Tiny vision-language models with tokenizer, image processor and template, and rows with pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_families import FAMILIES, TOKENS

pytest.importorskip("PIL", reason="pictures need Pillow")

NUM_STEPS, PER_STEP, LR = 4, 6, 1e-2
WORDS = "user assistant system what is shown the picture shows a red square two pictures yes no \n"
# the decoder of texts with heads as wide as kernels of GPUs want them
_WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}


def make_tokenizer(template: str, named: dict[str, str] | None = None) -> Any:
    """A byte-level BPE with the special tokens of all families; `named` are those that it has names for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440, special_tokens=TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator([WORDS] * 5, trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, **ends, extra_special_tokens=named or {})
    made.chat_template = template
    return made


def make_reader(folder: Path, family: str) -> Any:
    """Write the tokenizer and the processor of a family; return the values of its model's config."""
    own = FAMILIES[family]
    if own.needs is not None:
        pytest.importorskip(own.needs)
    pytest.importorskip("transformers", own.since)
    tokenizer = make_tokenizer(own.template, own.tokens)
    tokenizer.save_pretrained(folder)
    values, images = own.make(tokenizer.convert_tokens_to_ids)
    written = {"processor_class": own.processor, **own.fields, "image_processor": images}
    (folder / "processor_config.json").write_text(json.dumps(written))
    values["text_config"] = {**values["text_config"], "vocab_size": len(tokenizer), "eos_token_id": 2}
    return values | {"tie_word_embeddings": False}


def make_picture_model(
    folder: Path, family: str, *, wide: bool = False, of_tower: dict[str, Any] | None = None
) -> Path:
    """Write a random model of a family, with all that comes with one, into a folder.

    Its weights are numbers of bf16, so that a precision changes nothing but products; with `wide`, its heads are as
    kernels of GPUs want them. `of_tower` are other values of its tower.
    """
    import torch
    import transformers

    values = make_reader(folder, family)
    if wide:
        values = widened(values)
    values = {**values, "vision_config": {**values["vision_config"], **(of_tower or {})}}
    config = getattr(transformers, FAMILIES[family].config)(**values)
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
    width = _WIDE["hidden_size"]
    if "out_hidden_size" in vision or "embed_dim" in vision:
        vision["out_hidden_size" if "out_hidden_size" in vision else "hidden_size"] = width
    own = {"hidden_size": width} if "hidden_size" in values else {}
    return {**values, **own, "text_config": text, "vision_config": vision}


def draw(height: int, width: int, seed: int = 0, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """Return the file of a picture of random pixels, whose alpha is random too if the mode has one."""
    from PIL import Image

    shape = {"RGB": (3,), "RGBA": (4,), "LA": (2,), "L": ()}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *shape), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, kind, **options)
    return file.getvalue()


MODES = ("RGBA", "RGB", "RGB")
SIZES = ((20, 30), (33, 17), (16, 16), (48, 24), (9, 40), (25, 25))


def write_rows(folder: Path) -> Path:
    """Write a file of rows: texts only, one picture, several pictures in several turns; and the pictures beside it."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number, (height, width) in enumerate(SIZES):
        (folder / "pictures" / f"{number}.png").write_bytes(draw(height, width, number, mode=MODES[number % 3]))

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
            if section is None:
                del values[name]
        return make_config(values, [])
