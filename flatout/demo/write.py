"""Writes the demo's inputs: training and held-out conversations, a tokenizer trained on them, a tiny model's config."""

from __future__ import annotations

from pathlib import Path

from flatout.demo.conversations import sample_conversations, to_json_lines
from flatout.demo.model import VOCABULARY_SIZE, write_model_folder
from flatout.demo.settings import NUM_HELD_OUT, NUM_TRAIN, DemoFolder
from flatout.demo.tokenizer import train_tokenizer
from flatout.errors import UsageError
from flatout.io.durable_io import DurableIO


def write_demo(folder: DemoFolder, seed: int, *, num_train: int = NUM_TRAIN, num_held_out: int = NUM_HELD_OUT) -> None:
    """Write all inputs of the demo; the same seed writes the same bytes, so writing again changes nothing.

    Raises UsageError if `folder` holds conversations of another seed or version, which a run may depend on.
    """
    conversations = list(sample_conversations(num_train, seed, held_out=False))
    held_out = sample_conversations(num_held_out, seed, held_out=True)
    DurableIO().make_dir(folder.root)
    _write_once(folder.train_file, to_json_lines(conversations))
    _write_once(folder.held_out_file, to_json_lines(held_out))
    # with the role names, since the chat template writes them
    texts = (
        text for messages in conversations for message in messages for text in (message["role"], message["content"])
    )
    write_model_folder(folder.model_dir, train_tokenizer(texts, VOCABULARY_SIZE))


def _write_once(file: Path, text: str) -> None:
    if not file.exists():
        DurableIO().write_bytes(file, text.encode())
    elif file.read_text(encoding="utf-8") != text:
        raise UsageError(
            f"{file}: holds other conversations than this demo writes (another seed or version of flatout); "
            f"remove {file.parent}, or choose another folder"
        )
