"""Loads a tokenizer, and says which tokens control a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from tokenizers import AddedToken

from flatout.config.data import DataConfig
from flatout.environment import checks_again
from flatout.errors import DataError, FlatoutError, reason_of
from flatout.io.hub import hub_errors, hub_file, hub_source, is_folder
from flatout.io.json_file import read_json
from flatout.io.kept_facts import code_identity, find_facts, hashes_of, keep_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tags that templates and models use inside a turn: structure, even if a tokenizer calls them special.
_MARKUP = re.compile(r"</?(think|tool_call|tool_calls|tool_response|tools)>")
# the files that tokenizers are read from
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def tokenizer_of(data: DataConfig, model_name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a run uses, with its new tokens. Raises like `load_tokenizer`."""
    return load_tokenizer(data.tokenizer or model_name, added=data.added_tokens)


def new_token_ids(data: DataConfig, model_name: str) -> tuple[list[int], int]:
    """Return the ids of the new tokens, and the rows that the model needs for them; ([], 0) without new tokens."""
    if not data.added_tokens:
        return [], 0
    tokenizer = tokenizer_of(data, model_name)
    ids = tokenizer.convert_tokens_to_ids(list(data.added_tokens))
    return sorted(ids), len(tokenizer)


def load_tokenizer(
    name: str, revision: str | None = None, *, added: Mapping[str, bool] | None = None
) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of a hub id or folder; remote code is never run.

    `added` are tokens to add unless they exist, and whether each is special. Raises DataError if it cannot be loaded or
    has no fast form (only fast tokenizers have offsets, which masks need).
    """
    # here, because torch comes with it: who only opens what was built waits for neither
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        source, pinned = hub_source(name, revision)
        with hub_errors(name):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=pinned, trust_remote_code=False)
    except FlatoutError:
        raise
    except Exception as error:
        raise DataError(
            f"tokenizer {name!r} (revision {revision or 'main'}): cannot be loaded: {reason_of(error)}; "
            "give a hub id or a folder with tokenizer.json (offline, only cached tokenizers work)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise DataError(
            f"tokenizer {name!r} is a {type(tokenizer).__name__} without offsets; "
            "flatout needs a fast tokenizer (a tokenizer.json)"
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise DataError(f"tokenizer {name!r} has no tokens: tokenizer.json is missing or empty; copy it again")
    if (unknown := _unknown_end(tokenizer, name)) is not None:
        raise DataError(
            f"tokenizer {name!r}: tokenizer_config.json names the end token {unknown!r:.100}, which its vocabulary "
            "does not have; correct eos_token there"
        )
    known = tokenizer.get_vocab()
    new = {text: is_special for text, is_special in (added or {}).items() if text not in known}
    for is_special in (False, True):  # all at once: each call builds the vocabulary's index again
        tokens = [AddedToken(text, normalized=False, special=is_special) for text in new if new[text] is is_special]
        tokenizer.add_tokens(tokens, special_tokens=is_special)
    return tokenizer


def _unknown_end(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    """Return the end token if only loading has put it into the vocabulary, at an id that the model was not made for."""
    end = tokenizer.eos_token
    if end is None or not is_folder(name) or not (file := Path(name, "tokenizer.json")).is_file():
        return None
    # as JSON writes it, with and without escapes for other letters
    text, config = file.read_text(encoding="utf-8"), Path(name, "tokenizer_config.json")
    if any(json.dumps(end, ensure_ascii=escaped) in text for escaped in (True, False)) or not config.is_file():
        return None
    content = read_json(config, DataError)
    added = content.get("added_tokens_decoder") if isinstance(content, dict) else None
    known = [one.get("content") for one in (added or {}).values() if isinstance(one, dict)]
    older = Path(name, "added_tokens.json")
    return None if end in known or (older.is_file() and end in read_json(older, DataError)) else str(end)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a data set needs of a tokenizer: its digest, its number of tokens, its own chat template.

    `begins_with_bos`: it starts every text with its bos.
    """

    digest: str
    num_tokens: int
    chat_template: Any
    begins_with_bos: bool = False


def tokenizer_facts(
    name: str, *, added: Mapping[str, bool] | None = None, log: Callable[[str], None] = lambda text: None
) -> TokenizerFacts:
    """Return the facts of a tokenizer; it is loaded only if its files are not those of an earlier call.

    Loading takes a second or more: a vocabulary of 150,000 entries is read, and written again for the digest. Raises
    like `load_tokenizer`. `log` gets a line about kept facts that are damaged, or cannot be kept.
    """
    files = _files_of(name)
    key = {**code_identity(), "added": list((added or {}).items()), "files": files}
    if files and not checks_again() and (known := find_facts("tokenizer", key, log)):
        return TokenizerFacts(**known.facts)
    tokenizer = load_tokenizer(name, added=added)
    digest, begins = tokenizer_digest(tokenizer), begins_with_bos(tokenizer)
    facts = TokenizerFacts(digest, len(tokenizer), tokenizer.chat_template, begins)
    if files:
        keep_facts("tokenizer", key, asdict(facts), log)
    return facts


def _files_of(name: str) -> dict[str, str]:
    """Return what identifies a tokenizer's files: hashes of those in a folder, or a hub id's commit; else nothing."""
    if is_folder(name):
        folders = (Path(name), Path(name, "additional_chat_templates"))
        files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.suffix in _SUFFIXES]
        return hashes_of({str(path.relative_to(name)): path for path in files if path.is_file()})
    path = hub_file(name, "tokenizer_config.json", None)
    return {} if path is None else {"commit": path.parent.name}


def has_no_template(name: str) -> bool:
    """Whether the files of a tokenizer in a folder show that it has no chat template; it is not loaded."""
    config = Path(name, "tokenizer_config.json")
    if not is_folder(name) or not config.is_file():
        return False
    is_beside = any("chat_template" in path.name for path in Path(name).iterdir())
    return not is_beside and "chat_template" not in read_json(config, DataError)


def begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer starts every text with its bos."""
    bos = tokenizer.bos_token_id
    return bos is not None and bool(tokenizer("a")["input_ids"][:1] == [bos])


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return xxh3 of everything that decides ids: vocabulary, merges, normalization, added tokens, bos and eos."""
    digest = xxhash.xxh3_128(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(repr((tokenizer.bos_token, tokenizer.eos_token)).encode())
    return digest.hexdigest()


def added_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Return the texts of the added tokens, and whether each is special."""
    return {token.content: token.special for token in tokenizer.added_tokens_decoder.values() if token.content}


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern of these texts, the longest match first."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def control_pattern(tokenizer: PreTrainedTokenizerBase, *, markup: bool = False) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens, which must stay text if a user types them; None if there are none.

    Markup such as <think> is only included with `markup`.
    """
    special = [text for text, is_special in added_texts(tokenizer).items() if is_special]
    pattern = any_of(text for text in special if markup or not _MARKUP.fullmatch(text))
    return re.compile(pattern) if pattern else None
