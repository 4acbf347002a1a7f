"""A tokenizer's vocabulary as llama.cpp reads it from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flatout.errors import Fix, UsageError

LLAMA_CPP = Fix({"--llama-cpp": "FOLDER"}, "llama.cpp, which you install")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = "ByteLevel"
# how a tokenizer splits text before BPE, and whether whole words that are tokens are never split: llama.cpp's name
_SPLITS = {
    ((_GPT2,), False): "gpt-2",
    (("Digits", _GPT2), False): "smollm",
    ((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), False): "qwen2",
    ((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), True): "llama-bpe",
    (
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        True,
    ): "tekken",
}


def add_vocabulary(writer: Any, tokenizer: Any, num_rows: int, stop_ids: Sequence[int]) -> None:
    """Add a byte-level BPE vocabulary with its merges, special tokens and chat template to a gguf.GGUFWriter.

    `num_rows` are the rows of the embedding, of which the last may have no token; `stop_ids` end an answer. Raises
    UsageError for a tokenizer of another kind, or one that splits text in a way that has no name known here.
    """
    import gguf

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    split = _name_of_split(content)
    if len(tokenizer) > num_rows:
        raise UsageError(f"the tokenizer has {len(tokenizer):,} tokens, but the model's embedding only {num_rows:,}")
    texts = {token_id: text for text, token_id in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    kinds = [gguf.TokenType.NORMAL if row in texts else gguf.TokenType.UNUSED for row in range(num_rows)]
    for row, token in added.items():
        texts[row] = token["content"]
        kinds[row] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([texts.get(row, f"[PAD{row}]") for row in range(num_rows)])
    writer.add_token_types(kinds)
    merges = content["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    for name in ("bos", "eos", "unk", "pad"):
        if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    for field, token_id in stop_fields(tokenizer, stop_ids).items():
        getattr(writer, f"add_{field}_token_id")(token_id)
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(encoded[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def stop_fields(tokenizer: Any, stop_ids: Sequence[int]) -> dict[str, int]:
    """Return the fields that hold tokens that end an answer, beside a tokenizer's own end token.

    llama.cpp stops at the tokens of three fields: eos, eot and eom. The first of `stop_ids` always has one.
    """
    others = [token_id for token_id in stop_ids if token_id != tokenizer.eos_token_id]
    if tokenizer.eos_token_id is None and others:
        return dict(zip(("eos", "eot", "eom"), others, strict=False))
    # programs that know eot only find it, too, where it is the end token, and no other token needs the field
    first = stop_ids[:1] if stop_ids[:1] == [tokenizer.eos_token_id] and len(others) < 2 else []
    return dict(zip(("eot", "eom"), [*first, *others], strict=False))


def stops_left_out(tokenizer: Any, stop_ids: Sequence[int]) -> list[str]:
    """Return the tokens that end an answer and have no field, so that llama.cpp goes on behind them."""
    known_stops = {*stop_fields(tokenizer, stop_ids).values(), tokenizer.eos_token_id}
    return [str(tokenizer.decode([token_id])) for token_id in stop_ids if token_id not in known_stops]


def _name_of_split(content: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer.json splits text. Raises UsageError without one."""
    model, parts = content["model"], content["pre_tokenizer"] or {}
    words: list[str] = []
    is_plain = model["type"] == "BPE" and not model.get("byte_fallback") and not model.get("continuing_subword_prefix")
    is_plain = is_plain and (content["normalizer"] or {"type": "NFC"})["type"] == "NFC"
    for part in parts.get("pretokenizers", [parts]):
        if part.get("type") == "Split":
            is_plain = is_plain and part["behavior"] == "Isolated" and not part["invert"]
            words.append(part["pattern"].get("Regex", "other"))
        elif part.get("type") == "ByteLevel":
            is_plain = is_plain and not part["add_prefix_space"]
            words += ["ByteLevel"] if part["use_regex"] else []
        else:
            words.append(str(part.get("type")) if part.get("individual_digits", True) else "other")
    name = _SPLITS.get((tuple(words), bool(model.get("ignore_merges")))) if is_plain else None
    if name is None:
        raise UsageError(
            "GGUF: flatout writes the byte-level BPE tokenizers of GPT-2, Llama 3, Qwen2, Qwen3, SmolLM and Mistral "
            f"NeMo, but this one is another ({model['type']}, split by {', '.join(words)[:60] or 'nothing'})",
            [LLAMA_CPP],
        )
    return name
