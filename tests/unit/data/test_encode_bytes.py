"""Byte-level tokenizers are encoded without offsets: ids and masks must be those of the plain call and its offsets."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from flatout.data.encode import Encoder
from flatout.data.tokenizer import load_tokenizer

LETTERS = [
    *"ab c\n  éü漢字🙂'123\u2028",
    "hello world",
    " the",
    "👩‍👩‍👧",
    "\n\n",
    "<|im_start|>",
    "<|im_end|>",
    "e\u0301",
]


@pytest.mark.parametrize("name", ["tok_gpt2", "tok_minimind", pytest.param("tok_qwen3", marks=pytest.mark.exhaustive)])
def test_ids_and_masks_are_those_of_the_plain_call(name: str, shared: Path) -> None:
    tokenizer = load_tokenizer(str(shared / name))
    alone, ahead = Encoder(tokenizer), Encoder(tokenizer)
    rng, num_masked = random.Random(0), 0
    texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 60))) for _ in range(300)]
    ahead.encode_ahead(texts)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # ranges from token to token, where the tokens before them are whole characters of the text
        ends = [len(tokenizer.decode(ids[:count])) for count in range(len(ids) + 1)]
        whole = [count for count in range(len(ids) + 1) if tokenizer.decode(ids[:count]) == text[: ends[count]]]
        first, last = sorted(rng.sample(whole, 2)) if len(whole) > 1 else (0, 0)
        expected = np.arange(len(ids))
        expected = (expected >= first) & (expected < last)
        spans = [(ends[first], ends[last])] if ends[first] < ends[last] else []
        for encoder in (alone, ahead):
            found = encoder.encode(text, spans)
            assert found.token_ids.tolist() == ids
            assert found.loss_mask.tolist() == (expected if spans else np.zeros(len(ids), bool)).tolist()
        num_masked += int(expected.sum())
    assert num_masked > 1000


def test_truncation_and_padding_that_a_tokenizer_was_left_with_change_nothing(shared: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tok_gpt2"))
    texts = ["hello world, hello", "a"]
    plain = [tokenizer(text)["input_ids"] for text in texts]
    encoder = Encoder(tokenizer)
    for leave in (lambda: tokenizer.backend_tokenizer.enable_truncation(1), tokenizer.backend_tokenizer.enable_padding):
        leave()
        encoder.encode_ahead(texts)
        left = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        assert [one.ids for one in left] != plain
        found = [encoder.encode(text, [(0, len(text))]) for text in texts]
        assert [one.token_ids.tolist() for one in found] == plain
        assert all(one.loss_mask.all() for one in found)


def test_a_range_that_ends_inside_a_token_cuts_it(shared: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "tok_gpt2"))
    encoder, text = Encoder(tokenizer), "hello world, hello"
    encoder.encode_ahead([text])
    found = encoder.encode(text, [(0, 8)])
    cut = [tokenizer(part)["input_ids"] for part in (text[:8], text[8:])]
    assert found.token_ids.tolist() == cut[0] + cut[1]
    assert found.loss_mask.tolist() == [True] * len(cut[0]) + [False] * len(cut[1])
    assert tokenizer(text)["input_ids"] != cut[0] + cut[1]
