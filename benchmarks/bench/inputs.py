"""What every trainer is given: a model folder with random weights, and one store of token ids and loss masks.

Run as a module with SHAPE and FOLDER it writes the model folder in a process of its own, so that the one that starts
the runs never holds GPU memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from flatout.data.token_store import TokenStore
from flatout.errors import UsageError

from .rows import LENGTHS, Row
from .samples import Samples, random_samples, write_store, write_tokenizer
from .shapes import SHAPES, shape_config


def built_samples(folder: Path, num_samples: int) -> Samples:
    """The first samples of a set made by `flatout data build`, in its order. Raises UsageError when it has fewer."""
    store = TokenStore.open(folder)
    if store.num_samples < num_samples:
        raise UsageError(
            f"--data {folder}: {store.num_samples} samples, the steps need {num_samples}; take fewer steps"
        )
    end = int(store.offsets[num_samples])
    return np.array(store.token_ids[:end]), np.array(store.loss_mask[:end]), store.lengths[:num_samples]


def write_samples(root: Path, row: Row, model_dir: Path, num_steps: int, data: Path | None = None) -> TokenStore:
    """The samples of a row's steps as a registered store: from `data`, or random ones of the row's lengths."""
    vocab_size, lengths = int(SHAPES[row.shape]["vocab_size"]), LENGTHS[row.lengths]
    num_samples = num_steps * row.samples_per_step
    if data:
        samples = built_samples(data, num_samples)
    else:
        samples = random_samples(num_samples // lengths.samples_per_group, vocab_size, lengths)
    return write_store(root, str(model_dir), vocab_size, samples)


def write_model(shape: str, folder: Path) -> None:
    """Random bf16 weights of a shape, made on the GPU where there is one, and a tokenizer, in transformers' format."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    half_done = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(half_done, ignore_errors=True)
    half_done.mkdir(parents=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape_config(shape)), dtype=torch.bfloat16)
    model.save_pretrained(str(half_done), max_shard_size="4GB")
    write_tokenizer(half_done)
    half_done.rename(folder)


def write_weightless_model(shape: str, folder: Path) -> None:
    """What flatout draws random weights from: config.json and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_config(shape)), encoding="utf-8")
    write_tokenizer(folder)


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
