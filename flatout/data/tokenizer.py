"""Loading a tokenizer, and what must hold between it, the data and the model."""

from __future__ import annotations

import re

import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flatout.errors import DataError

# Tags that templates and models use inside a turn; they are structure also where a tokenizer calls them special.
_MARKUP = re.compile(r"</?(think|tool_call|tool_calls|tool_response|tools)>")


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a hub id or folder; remote code is never run.

    Raises DataError when it cannot be loaded or has no fast form (offsets, which masks need, exist only there).
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"tokenizer {name!r} (revision {revision or 'main'}): cannot be loaded: {reason}; "
            "give a hub id or a folder with tokenizer.json (offline: only what is in the cache)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise DataError(
            f"tokenizer {name!r} is a {type(tokenizer).__name__} without offsets; "
            "flatout needs a fast tokenizer (a tokenizer.json)"
        )
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3 of everything that decides ids: vocabulary, merges, normalisation, added tokens, bos and eos."""
    digest = xxhash.xxh3_128(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(repr((tokenizer.bos_token, tokenizer.eos_token)).encode())
    return digest.hexdigest()


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Special tokens by text: those that, typed by a user, must stay text. Markup such as <think> is not among them."""
    added = tokenizer.added_tokens_decoder
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special and token.content and not _MARKUP.fullmatch(token.content)
    }


def control_pattern(tokens: dict[str, int]) -> re.Pattern[str] | None:
    """Matches any control token, the longest first; None when there are none."""
    if not tokens:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True)))


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself begins every text with bos (then plain documents do, too)."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def check_vocabulary(store_max_id: int, num_embeddings: int) -> None:
    """Every token id of the data must have an embedding row; a model may have more rows than the tokenizer.

    Raises DataError that names the ids out of range.
    """
    if store_max_id >= num_embeddings:
        raise DataError(
            f"the data has token ids {num_embeddings}..{store_max_id}, but the model has {num_embeddings} "
            f"embedding rows (0..{num_embeddings - 1}); build with this model's own tokenizer, or resize the model"
        )


def end_of_text_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The id of the eos token, which ends plain documents. Raises DataError when the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer {name!r} has no eos token, so a plain document cannot be ended; set eos_token in it"
        )
    return int(tokenizer.eos_token_id)
