"""What every system is given: a model folder with random weights, and one store of token ids and label masks.

Run as `python -m flatout.bench.inputs SHAPE FOLDER` it writes the model folder in a process of its own, so that
the one that starts the runs never holds GPU memory.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from flatout.bench.rows import SAMPLES_PER_STEP
from flatout.bench.shapes import shape_config
from flatout.data import registry
from flatout.data.store import StoreMeta, TokenStore, new_store
from flatout.errors import UsageError

NAME = "bench"
# random ids stay in the benchmark tokenizer's own range, as peers may decode some; id 3 and below are special
MIN_ID, MAX_ID = 4, 1000
LABEL_SHARE = 0.6


def chat_lengths(step: int) -> list[int]:
    """Tokens of one step's samples: lognormal (mean of logs 6.0, sigma 0.8) clipped to 32..2048, seeded by the step."""
    generator = torch.Generator().manual_seed(step)
    draws = torch.randn(SAMPLES_PER_STEP, generator=generator) * 0.8 + 6.0
    lengths: list[int] = draws.exp().clamp(32, 2048).long().tolist()
    return lengths


def chat_samples(num_steps: int, vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    """Random ids [T], label flags [T] (the last 60 % of each sample) and lengths [N] of `num_steps` steps."""
    lengths = np.array([n for step in range(num_steps) for n in chat_lengths(step)], np.int64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MIN_ID, min(MAX_ID, vocab_size), (int(lengths.sum()),), generator=generator)
    trained = np.concatenate([np.arange(n) >= int(n * (1 - LABEL_SHARE)) for n in lengths])
    return ids.numpy().astype(np.int32), trained, lengths


def built_samples(folder: Path, num_samples: int) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    """The first samples of a set made by `flatout data build`, in its order. Raises UsageError when it has fewer."""
    store = TokenStore.open(folder)
    if store.num_samples < num_samples:
        raise UsageError(
            f"--data {folder}: {store.num_samples} samples, the steps need {num_samples}; take fewer steps"
        )
    end = int(store.offsets[num_samples])
    return np.array(store.token_ids[:end]), np.array(store.trained[:end]), store.lengths[:num_samples]


def digest(token_ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> str:
    """xxh3 of all ids and label flags in training order: equal digests are equal work."""
    return xxhash.xxh3_64_hexdigest(
        np.ascontiguousarray(token_ids, np.int32).tobytes() + np.ascontiguousarray(trained, np.bool_).tobytes()
    )


def write_store(root: Path, model_dir: Path, num_steps: int, data: Path | None) -> TokenStore:
    """The samples of all steps of SAMPLES_PER_STEP as a registered token store, from `data` or of chat-like lengths."""
    from flatout.data.tokenizer import load_tokenizer, tokenizer_digest
    from flatout.models.source import read_model_config

    vocab_size = int(read_model_config(str(model_dir), None)["vocab_size"])
    num_samples = num_steps * SAMPLES_PER_STEP
    token_ids, trained, lengths = built_samples(data, num_samples) if data else chat_samples(num_steps, vocab_size)
    folder = registry.built_dir(root, NAME)
    fingerprint = digest(token_ids, trained).ljust(32, "0")
    meta = StoreMeta(
        name=NAME,
        fingerprint=fingerprint,
        tokenizer=str(model_dir),
        tokenizer_digest=tokenizer_digest(load_tokenizer(str(model_dir))),
        template="",
        template_digest="",
        loss_type="response_only",
        max_tokens=int(lengths.max()),
        vocabulary_size=vocab_size,
        files=(NAME,),
        counts={"rows": num_samples},
        max_token_id=int(token_ids.max()),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_store(folder) as writer:
        writer.append(token_ids, trained, lengths, np.zeros(num_samples, np.int32), np.arange(1, num_samples + 1))
        writer.finish(meta, {"counts": {"rows": num_samples}})
    entry = registry.Entry(
        name=NAME,
        path=str(folder.relative_to(root)),
        sources=(NAME,),
        num_samples=num_samples,
        tokenizer=str(model_dir),
        template=None,
        loss_type="response_only",
        fingerprint=fingerprint,
        created="",
    )
    registry.upsert(root, entry)
    return TokenStore.open(folder)


def write_model(shape: str, folder: Path) -> None:
    """Random bf16 weights of a shape, made on the GPU where there is one, and a tokenizer, in transformers' format."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = shape_config(shape)
    config = AutoConfig.for_model(**values)
    shutil.rmtree(folder, ignore_errors=True)
    half_done = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(half_done, ignore_errors=True)
    half_done.mkdir(parents=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(str(half_done), max_shard_size="4GB")
    write_tokenizer(half_done)
    half_done.rename(folder)


def write_tokenizer(folder: Path) -> None:
    """A small real BPE tokenizer with a ChatML template: peers look at its special tokens, nobody tokenises with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_ID,
        special_tokens=["<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
