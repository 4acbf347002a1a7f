"""Writes the demo's inputs: training and held-out conversations, a tokenizer trained on them, a tiny model's config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flatout.demo.conversations import ChatMessage, draw_conversations, to_json_lines
from flatout.demo.model import VOCABULARY_SIZE, write_model_folder
from flatout.demo.settings import NUM_HELD_OUT, NUM_TRAIN, DemoFolder
from flatout.demo.tokenizer import train_tokenizer
from flatout.errors import UsageError


def write_demo(folder: DemoFolder, seed: int, *, num_train: int = NUM_TRAIN, num_held_out: int = NUM_HELD_OUT) -> None:
    """Writes all inputs of the demo; the same seed writes the same bytes, so doing it again changes nothing.

    Raises UsageError when `folder` holds conversations of another seed or version, which a run may depend on.
    """
    conversations = list(draw_conversations(num_train, seed, held_out=False))
    held_out = draw_conversations(num_held_out, seed, held_out=True)
    folder.root.mkdir(parents=True, exist_ok=True)
    _write_once(folder.train_file, to_json_lines(conversations))
    _write_once(folder.held_out_file, to_json_lines(held_out))
    write_model_folder(folder.model_dir, train_tokenizer(_texts(conversations), VOCABULARY_SIZE))


def _texts(conversations: list[list[ChatMessage]]) -> Iterator[str]:
    """What the tokenizer is trained on: contents, and the role names that the chat template writes."""
    for messages in conversations:
        for message in messages:
            yield message["role"]
            yield message["content"]


def _write_once(file: Path, text: str) -> None:
    if not file.exists():
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        raise UsageError(
            f"{file}: holds other conversations than this demo writes (another seed or version of flatout); "
            f"remove {file.parent}, or choose another folder"
        )
