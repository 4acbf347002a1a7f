"""Writes the demo's inputs: training and held-out conversations, a tokenizer trained on them, a tiny model's config."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from flatout.demo.conversations import sample_conversations
from flatout.demo.settings import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE
from flatout.errors import UsageError
from flatout.io.durable_io import DurableIO

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MODELS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
VOCABULARY_SIZE: int = MODELS["conversations"]["vocab_size"]


def write_demo(folder: Path, seed: int, *, num_train: int = 5000, num_held_out: int = 200) -> None:
    """Write all inputs of the demo; the same seed writes the same bytes, so writing again changes nothing.

    Raises UsageError as `write_once` does.
    """
    conversations = list(sample_conversations(num_train, seed, held_out=False))
    held_out = sample_conversations(num_held_out, seed, held_out=True)
    DurableIO().make_dir(folder)
    write_rows(folder / TRAIN_FILE, ({"messages": messages} for messages in conversations))
    write_rows(folder / HELD_OUT_FILE, ({"messages": messages} for messages in held_out))
    # with the role names, since the chat template writes them
    texts = (
        text for messages in conversations for message in messages for text in (message["role"], message["content"])
    )
    write_model_folder(folder / MODEL_DIR, train_tokenizer(texts, VOCABULARY_SIZE))


def write_once(file: Path, content: bytes) -> None:
    """Write a file, or leave it as it is. Raises UsageError if it has other content, which a run may depend on."""
    if not (file.exists() or file.is_symlink()):
        DurableIO().write_bytes(file, content)
    elif not file.is_file() or file.read_bytes() != content:
        raise UsageError(
            f"{file}: is not this demo's (yours, or of another seed or version of flatout); remove {file.parent}, or "
            "choose a different folder"
        )


def write_rows(file: Path, rows: Iterable[Any]) -> None:
    """Write rows as JSONL, as `write_once` does."""
    write_once(file, "".join(json.dumps(row) + "\n" for row in rows).encode())


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016, arXiv:1508.07909) of at most `vocab_size` entries.

    Every byte has an entry, so any text can be encoded. `<|im_end|>` ends a turn and is the eos token; `<|endoftext|>`
    is the pad token.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START]})
    tokenizer.chat_template = MODELS["chatml"]
    return tokenizer


def write_model_folder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a tiny Qwen3's config.json, generation_config.json and the tokenizer's files; makes `folder` if needed."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_model(folder, Qwen3Config(**MODELS["conversations"], **ends), tokenizer)


def save_model(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write what a model without weights consists of into a folder, which is made if needed, as `write_once` does."""
    DurableIO().make_dir(folder)
    ends = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with tempfile.TemporaryDirectory() as temp:
        parts: tuple[Any, ...] = (config, ends, tokenizer)
        for part in parts:
            part.save_pretrained(temp)
        for file in sorted(Path(temp).iterdir()):
            write_once(folder / file.name, file.read_bytes())
