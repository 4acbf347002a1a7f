"""Text with loss ranges -> token ids and a mask; control tokens typed in the data stay text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, processors

from flatout.data.tokenizer import added_texts, any_of, control_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
# Placeholders of private-use characters: for the i-th special token, and for a cut between two tokens.
_STAND_IN = "\U000f5a10{}\U000f5a11"
_CUT = "\U000f5a12"
# texts that are encoded together take memory together
_CHARACTERS_AT_ONCE = 1 << 17
_RESERVED = re.compile("[\U000f5a10-\U000f5a12]")


class UnencodableError(ValueError):
    """A text whose tokens would not give it back, or whose loss would begin or end inside a token that stays whole."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """`token_ids` int32 [L]; `loss_mask` bool [L], True for tokens inside a loss range; `pictures` in their order."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    pictures: tuple[Any, ...] = ()


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, by id; filled as they are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # lazy: who only opens a store needs none

        super().__init__((i, token.content.encode()) for i, token in tokenizer.get_added_tokens_decoder().items())
        self._tokenizer = tokenizer
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        # a character that stands for no byte: 0xFF is in no text
        self[token_id] = bytes(self._byte_of.get(letter, 0xFF) for letter in token)
        return self[token_id]


class Encoder:
    """Encodes like `tokenizer(text, add_special_tokens=False)`, and records which characters each token covers.

    Decoding the ids gives the text back, as far as it does for that call: what a normalizer changes is left to it. Two
    cases differ from that call, on purpose: special tokens inside `typed` ranges become ordinary text; and where a
    token would cross the edge of a loss range, the text is cut there. The same cut happens at inference: the prompt is
    encoded first, and the answer's tokens follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._special = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._stand_ins = {token.content: _STAND_IN.format(i) for i, token in self._special.items()}
        self._pattern = control_pattern(tokenizer, markup=True)
        # every added token stays whole; those that are no special ones are read from any text
        self._whole = re.compile(any_of(added_texts(tokenizer)) or r"(?!)")
        self._decode = tokenizer.decode
        self._is_bytes = isinstance(self._backend.decoder, decoders.ByteLevel)
        self._bytes = _TokenBytes(self._backend)
        self._ahead: dict[str, list[int]] = {}

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy for encoding with offsets. Making it takes as long as loading the tokenizer, and few sets need it."""
        plain = Tokenizer.from_str(self._backend.to_str())
        plain.no_truncation()
        plain.no_padding()
        # ByteLevel's post-processor would drop leading spaces from the offsets; ids do not depend on it here
        plain.post_processor = processors.Sequence([])
        return plain

    @cached_property
    def _cutting(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return a copy that reads special tokens only from placeholders, and their real ids by placeholder id."""
        copy = Tokenizer.from_str(self._plain.to_str())
        copy.encode_special_tokens = True
        copy.add_tokens([AddedToken(_CUT, normalized=False, special=False)])
        real_ids: dict[int, int] = {}
        for real_id, token in self._special.items():
            text, strips = self._stand_ins[token.content], {"lstrip": token.lstrip, "rstrip": token.rstrip}
            copy.add_tokens([AddedToken(text, normalized=False, special=False, **strips)])
            stand_in_id = copy.token_to_id(text)
            assert stand_in_id is not None
            real_ids[stand_in_id] = real_id
        return copy, real_ids

    def encode_ahead(self, texts: Sequence[str]) -> None:
        """Encode texts that `encode` will be asked for, one after the other, which takes less time than one by one.

        Forgets those of the call before.
        """
        self._ahead.clear()
        begin, size = 0, 0
        for end, text in enumerate(texts if self._is_bytes else (), start=1):
            size += len(text)
            if size >= _CHARACTERS_AT_ONCE or end == len(texts):
                done = self._backend.encode_batch_fast(list(texts[begin:end]), add_special_tokens=False)
                self._ahead.update(zip(texts[begin:end], (encoding.ids for encoding in done), strict=True))
                begin, size = end, 0

    def _by_bytes(self, text: str, spans: Sequence[Span]) -> TokenizedText | None:
        """Encode without offsets, which takes a fifth less time: the bytes of tokens show what each of them covers.

        Returns None unless all bytes together are the text's, which proves their places, or if a range with loss begins
        or ends inside a token.
        """
        ids = self._ahead.get(text)
        if ids is None:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        pieces = [*map(self._bytes.__getitem__, ids)]
        # also if the tokenizer was left with truncation or padding
        if b"".join(pieces) != text.encode(errors="replace"):
            return None
        if not text.isascii():  # from characters to bytes
            edges = [0, *(edge for span in spans for edge in span)]
            parts = [len(text[start:end].encode()) for start, end in pairwise(edges)]
            places = list(accumulate(parts))
            spans = list(zip(places[::2], places[1::2], strict=True))
        starts = np.fromiter(accumulate(map(len, pieces), initial=0), np.int64, len(pieces) + 1)
        loss_mask, is_cut = _loss_mask(np.stack([starts[:-1], starts[1:]], axis=1), spans)
        return None if is_cut else TokenizedText(np.array(ids, np.int32), loss_mask)

    def encode(self, text: str, spans: Sequence[Span], typed: Sequence[Span] = ()) -> TokenizedText:
        """Return the token ids of `text` and its loss mask.

        `spans` (loss) and `typed` (control tokens that are data) are ascending, disjoint. Raises UnencodableError.
        """
        if not typed and self._is_bytes and (encoded := self._by_bytes(text, spans)):
            return encoded
        if not typed:
            encoding: Encoding = self._plain.encode(text, add_special_tokens=False)
            ids = np.array(encoding.ids, dtype=np.int32)
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            loss_mask, is_cut = _loss_mask(offsets, spans)
            if not is_cut:
                self._require_covered(text, offsets)
                return TokenizedText(ids, loss_mask)
        cuts = sorted({edge for span in spans for edge in span if 0 < edge < len(text)})
        ids, offsets = self._encode_cut(text, cuts, typed)
        self._require_same(text, ids)
        return TokenizedText(ids, _loss_mask(offsets, spans)[0])

    def _require_covered(self, text: str, offsets: NDArray[np.int64]) -> None:
        """Raise UnencodableError if characters other than white space have no token, and no normalizer changes them.

        A normalizer may drop characters, or join them to those before: NFC makes one character of a letter and an
        accent, and offsets cover the letter alone.
        """
        first, last = (int(offsets[0, 0]), int(offsets[-1, 1])) if len(offsets) else (0, 0)
        if first == 0 and last == len(text) and not (offsets[1:, 0] > offsets[:-1, 1]).any():
            return  # nearly always
        normalizer = self._plain.normalizer
        normalize = normalizer.normalize_str if normalizer else str
        starts, ends = np.append(offsets[:, 0], len(text)), np.append(0, offsets[:, 1])
        for gap in np.flatnonzero(starts > ends):
            lost, before = text[ends[gap] : starts[gap]], text[starts[gap - 1] if gap else 0 : ends[gap]]
            left = normalize(lost).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").strip()  # SentencePiece's space
            if left and left in normalize(before + lost):
                raise UnencodableError(
                    f"the tokenizer has no token for {lost[:20]!r}, and would leave it out; remove it"
                )

    def _require_same(self, text: str, ids: NDArray[np.int32]) -> None:
        """Raise UnencodableError unless a text that was cut decodes to itself, or as it does uncut.

        White space may differ: a tokenizer may begin what follows a cut with a space, as it does at inference.
        """
        got = self._decode(ids.tolist())
        if got == text:
            return
        whole = self._decode(self._plain.encode(text, add_special_tokens=False).ids)
        if "".join(got.split()) != "".join(whole.split()):
            raise UnencodableError("its tokens do not give the text back where the loss begins or ends; remove the row")

    def _encode_cut(
        self, text: str, edges: Sequence[int], typed: Sequence[Span]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if match := _RESERVED.search(text):
            raise UnencodableError(f"the text contains the private-use character U+{ord(match[0]):X}; remove it")
        specials = [match.span() for match in self._pattern.finditer(text)] if self._pattern else []
        specials = [span for span in specials if not _overlaps(span, typed)]
        whole = specials + [match.span() for match in self._whole.finditer(text) if not _overlaps(match.span(), typed)]
        for start, end in whole:
            if inside := [edge for edge in edges if start < edge < end]:
                raise UnencodableError(
                    f"the loss would begin or end inside the token {text[start:end]!r}, at character {inside[0]}; "
                    "change the text next to it, or use a different template"
                )
        at_edges = {edge for span in specials for edge in span}
        cuts = [edge for edge in edges if edge not in at_edges]
        marks = sorted(
            [(start, end, self._stand_ins[text[start:end]]) for start, end in specials] + [(c, c, _CUT) for c in cuts]
        )
        parts, position = list[str](), 0
        for start, end, stand_in in marks:
            parts += [text[position:start], stand_in]
            position = end
        cutting, real_ids = self._cutting
        encoding = cutting.encode("".join([*parts, text[position:]]), add_special_tokens=False)
        cut_id = cutting.token_to_id(_CUT)
        ids, offsets, shift, ahead = list[int](), list[Span](), 0, iter(marks)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id != cut_id and token_id not in real_ids:
                ids.append(token_id)
                offsets.append((start + shift, end + shift))
                continue
            first, last, stand_in = next(ahead)  # each mark is one token
            shift += last - first - len(stand_in)
            if token_id != cut_id:
                ids.append(real_ids[token_id])
                offsets.append((first, last))
        return np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(start < span[1] and span[0] < end for start, end in others)


def _loss_mask(offsets: NDArray[np.int64], spans: Sequence[Span]) -> tuple[NDArray[np.bool_], bool]:
    """Return whether each token lies inside one range [L], and whether a range begins or ends inside a token."""
    edges = np.array(spans, dtype=np.int64).reshape(-1)
    first = np.searchsorted(edges, offsets[:, 0], side="right")
    last = np.searchsorted(edges, offsets[:, 1], side="left")
    return (first % 2 == 1) & (first == last), bool((first < last).any())
