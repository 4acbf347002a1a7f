"""The demo's model folder: the shape of a tiny Qwen3 and the tokenizer, without weights (`model.init: random`)."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY_SIZE = 1024


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """About 0.6 million weights in two layers: the smallest that learns every family of the demo in a minute.

    Two layers, since to copy from context takes two (one finds, one fetches). `initializer_range` is 4 times the
    usual 0.02: at width 128 that is 1 / sqrt(width), and the demo's families are learnt in half the steps.
    """
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.088,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
    )


def write_model_folder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files; `folder` is made when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_config(tokenizer).save_pretrained(str(folder))
    ends = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ends.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
