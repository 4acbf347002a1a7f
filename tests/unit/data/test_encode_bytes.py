"""Byte-level tokenizers are encoded without offsets: ids and masks must be those of the plain call and its offsets."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flatout.data.encode import Encoder, UnencodableError
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
def test_ids_and_masks_are_those_of_the_plain_call(name, shared):
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


def test_truncation_and_padding_that_a_tokenizer_was_left_with_change_nothing(shared):
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


def test_a_range_that_ends_inside_a_token_cuts_it(shared):
    tokenizer = load_tokenizer(str(shared / "tok_gpt2"))
    encoder, text = Encoder(tokenizer), "hello world, hello"
    encoder.encode_ahead([text])
    found = encoder.encode(text, [(0, 8)])
    cut = [tokenizer(part)["input_ids"] for part in (text[:8], text[8:])]
    assert found.token_ids.tolist() == cut[0] + cut[1]
    assert found.loss_mask.tolist() == [True] * len(cut[0]) + [False] * len(cut[1])
    assert tokenizer(text)["input_ids"] != cut[0] + cut[1]


def tokenizer_of(model: models.Model, normalizer: normalizers.Normalizer | None, *, is_bytes: bool) -> Any:
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if is_bytes:
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
# no token for y, and none that stands for unknown characters
WORDS = {letter: i for i, letter in enumerate("▁abcex")}


@pytest.mark.parametrize(
    "text", ["cafe\u0301 a", "e\u0301", "tie\u0302\u0301ng", "a\u0301\u0301", "\u1112\u1161\u11ab", "caf\u00e9", "a b"]
)
def test_characters_that_a_normalizer_joins_are_encoded(text):
    tokenizer = tokenizer_of(models.BPE(BYTES, []), normalizers.NFC(), is_bytes=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    encoded = Encoder(tokenizer).encode(text, [(0, len(text))])
    assert encoded.token_ids.tolist() == ids
    assert encoded.loss_mask.all()
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Prepend("▁")])
@pytest.mark.parametrize("text", ["abyc", "aye\u0301x", "aby"])
def test_characters_without_a_token_are_refused(normalizer, text):
    encoder = Encoder(tokenizer_of(models.BPE(WORDS, []), normalizer, is_bytes=False))
    assert len(encoder.encode("abcx", [(0, 4)]).token_ids) >= 4
    with pytest.raises(UnencodableError, match="has no token for"):
        encoder.encode(text, [(0, len(text))])
