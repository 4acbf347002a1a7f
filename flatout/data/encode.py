"""Text with loss ranges -> token ids and a mask, with typed control tokens kept as text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from flatout.data.tokenizer import control_pattern

Span = tuple[int, int]
# Stand-ins in private-use characters: for the i-th special token, and for a cut between two tokens.
_STAND_IN = "\U000f5a10{}\U000f5a11"
_CUT = "\U000f5a12"


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """`token_ids` int32 [L]; `trained` bool [L]: the token lies inside a loss range."""

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


class Encoder:
    """Encodes like `tokenizer(text, add_special_tokens=False)`, and knows which characters each token covers.

    Two cases differ from that call, on purpose: special tokens inside `typed` ranges become ordinary text; and where
    a token would reach over the edge of a loss range, the text is cut at the edge. The cut is what happens at
    inference too: the prompt is encoded first and the answer's tokens follow it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._plain = _offset_tokenizer(tokenizer)
        special = {token.content: (i, token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._pattern = control_pattern({text: i for text, (i, _) in special.items()})
        self._stand_ins = {text: _STAND_IN.format(i) for text, (i, _) in special.items()}
        self._special = special

    @cached_property
    def _real_ids(self) -> dict[int, int]:
        ids = {self._stand_ins[text]: token_id for text, (token_id, _) in self._special.items()}
        return {new: real for text, real in ids.items() if (new := self._cutting.token_to_id(text)) is not None}

    @cached_property
    def _cutting(self) -> Tokenizer:
        """A copy that reads no special token out of text; each has a stand-in that is never in text."""
        copy = Tokenizer.from_str(self._plain.to_str())
        copy.encode_special_tokens = True
        stand_ins = [
            AddedToken(
                self._stand_ins[token.content],
                normalized=False,
                special=False,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
            )
            for _, token in self._special.values()
        ]
        copy.add_tokens([*stand_ins, AddedToken(_CUT, normalized=False, special=False)])
        return copy

    def encode(self, text: str, spans: Sequence[Span], typed: Sequence[Span] = ()) -> TokenisedText:
        """Token ids of `text`; `spans` (loss) and `typed` (control tokens that are data) are ascending, disjoint."""
        if not typed:
            encoding: Encoding = self._plain.encode(text, add_special_tokens=False)
            ids = np.array(encoding.ids, dtype=np.int32)
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            if not len(_crossed(offsets, spans)):
                return TokenisedText(ids, _inside(offsets, spans))
        cuts = sorted({edge for span in spans for edge in span if 0 < edge < len(text)})
        ids, offsets = self._encode_cut(text, cuts, typed)
        return TokenisedText(ids, _inside(offsets, spans))

    def _encode_cut(
        self, text: str, edges: Sequence[int], typed: Sequence[Span]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        specials = [found.span() for found in self._pattern.finditer(text)] if self._pattern else []
        specials = [span for span in specials if not _overlaps(span, typed)]
        cuts = [edge for edge in edges if not any(edge in span for span in specials)]
        marks = sorted(
            [(start, end, self._stand_ins[text[start:end]]) for start, end in specials] + [(c, c, _CUT) for c in cuts]
        )
        parts: list[str] = []
        # anchors: where the text between two marks begins, in the marked and in the real text
        marked_anchors, real_anchors, position, length = [0], [0], 0, 0
        for start, end, stand_in in marks:
            parts += [text[position:start], stand_in]
            length += start - position + len(stand_in)
            position = end
            marked_anchors.append(length)
            real_anchors.append(end)
        encoding = self._cutting.encode("".join([*parts, text[position:]]), add_special_tokens=False)
        cut_id, real_ids = self._cutting.token_to_id(_CUT), self._real_ids
        ids, offsets = [], []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id == cut_id:
                continue
            anchor = bisect_right(marked_anchors, start) - 1
            shift = real_anchors[anchor] - marked_anchors[anchor]
            if token_id in real_ids:
                mark = marks[anchor]
                ids.append(real_ids[token_id])
                offsets.append((mark[0], mark[1]))
            else:
                ids.append(token_id)
                offsets.append((start + shift, end + shift))
        return np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)


def _offset_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    # ByteLevel's post-processor would cut leading spaces out of the offsets; ids do not depend on it here.
    copy.post_processor = processors.Sequence([])
    return copy


def _edges(spans: Sequence[Span]) -> NDArray[np.int64]:
    return np.array([edge for span in spans for edge in span], dtype=np.int64)


def _inside(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """A token is trained when all its characters lie in one range."""
    edges = _edges(spans)
    first = np.searchsorted(edges, offsets[:, 0], side="right")
    last = np.searchsorted(edges, offsets[:, 1], side="left")
    inside: NDArray[np.bool_] = (first % 2 == 1) & (first == last)
    return inside


def _crossed(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.int64]:
    """Edges that lie strictly inside a token."""
    edges = _edges(spans)
    first = np.searchsorted(edges, offsets[:, 0], side="right")
    last = np.searchsorted(edges, offsets[:, 1], side="left")
    return np.flatnonzero(first < last)


def _overlaps(span: Span, typed: Sequence[Span]) -> bool:
    return any(start < span[1] and span[0] < end for start, end in typed)
