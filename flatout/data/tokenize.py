"""A sample -> its rows of token ids and label flags, under the length policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from flatout.data.conversation import Conversation, PlainText, Sample, TokenRow
from flatout.data.encode import Encoder, TokenisedText
from flatout.data.mask import Masker
from flatout.data.template import ChatTemplate, choose_template
from flatout.data.tokenizer import adds_bos, control_pattern, control_tokens, end_of_text_id, load_tokenizer
from flatout.errors import DataError

TooLong = Literal["error", "drop", "truncate", "split"]
Fate = Literal["kept", "truncated", "split", "too_long", "no_labels", "lost_labels"]


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """All that decides a sample's tokens, hashable. `template_source` None: there is no template to use."""

    tokenizer_name: str
    template_name: str
    template_source: str | None
    loss_type: Literal["response_only", "all"] = "response_only"
    max_tokens: int | None = None
    too_long: TooLong = "truncate"


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """What became of one sample.

    `rows` are what goes into the store (more than one only when split, none when left out); `num_tokens` is its
    length before the policy; `num_windows_dropped` counts windows of a split sample that held no label.
    """

    rows: tuple[TokenisedText, ...]
    fate: Fate
    num_tokens: int
    num_typed_control: int = 0
    num_reasoning_dropped: int = 0
    num_windows_dropped: int = 0


class SampleTokenizer:
    """Turns samples into tokens. A template is needed only once a conversation comes."""

    def __init__(self, options: TokenizeOptions, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Loads the tokenizer unless one is given. Raises DataError."""
        self.options = options
        self.tokenizer = load_tokenizer(options.tokenizer_name) if tokenizer is None else tokenizer
        self.encoder = Encoder(self.tokenizer)
        self._control = control_pattern(control_tokens(self.tokenizer))
        self._bos = [int(self.tokenizer.bos_token_id)] if adds_bos(self.tokenizer) else []
        self._num_ids = max(len(self.tokenizer), self.tokenizer.vocab_size)
        self._masker: Masker | None = None

    @property
    def masker(self) -> Masker:
        """The masker of the template. Raises DataError (C17) when there is no template."""
        if self._masker is None:
            options = self.options
            if options.template_source is None:
                chosen = choose_template(self.tokenizer, None, options.tokenizer_name)
            else:
                chosen = ChatTemplate.checked(options.template_name, options.template_source, self.tokenizer)
            self._masker = Masker(chosen, options.loss_type, self._control)
        return self._masker

    def notes(self) -> list[str]:
        """What a user should know about this template with this tokenizer, a sentence each."""
        if self.options.loss_type == "all":
            return []
        end = self.masker.end_of_turn()
        name = self.masker.template.name
        if not end:
            return [f"chat template {name!r} trains no end-of-turn token: the model will not learn when to stop"]
        num_tokens = len(self.encoder.encode(end, ()).token_ids)
        if num_tokens > 1:
            return [
                f"the end of turn {end!r} of chat template {name!r} is {num_tokens} tokens of this tokenizer, not one"
            ]
        return []

    def __call__(self, sample: Sample) -> TokenizedSample:
        """Tokens of one sample; the first token is never trained, since nothing predicts it. Raises DataError."""
        if isinstance(sample, Conversation):
            masked = self.masker.mask(sample)
            text = self.encoder.encode(masked.text, masked.spans, masked.typed)
            return self._fit(text, len(masked.typed), masked.num_reasoning_dropped)
        if isinstance(sample, PlainText):
            return self._plain(sample)
        return self._fit(self._checked(sample))

    def _plain(self, sample: PlainText) -> TokenizedSample:
        if not sample.text:
            return TokenizedSample((), "no_labels", 0)
        text = sample.prompt + sample.text
        typed = [found.span() for found in self._control.finditer(text)] if self._control else []
        start = 0 if self.options.loss_type == "all" else len(sample.prompt)
        body = self.encoder.encode(text, [(start, len(text))], typed)
        eos = end_of_text_id(self.tokenizer, self.options.tokenizer_name)
        ids = np.concatenate([np.array(self._bos, np.int32), body.token_ids, np.array([eos], np.int32)])
        trained = np.concatenate([np.zeros(len(self._bos), np.bool_), body.trained, np.ones(1, np.bool_)])
        return self._fit(TokenisedText(ids, trained), len(typed))

    def _checked(self, sample: TokenRow) -> TokenisedText:
        if len(sample.token_ids) != len(sample.trained):
            raise DataError(
                f"{sample.origin}: {len(sample.token_ids)} token ids but {len(sample.trained)} label flags; "
                "they must be as many"
            )
        bad = next((i for i, token in enumerate(sample.token_ids) if not 0 <= token < self._num_ids), None)
        if bad is not None:
            raise DataError(
                f"{sample.origin}: token id {sample.token_ids[bad]} at position {bad} is outside "
                f"0..{self._num_ids - 1} of tokenizer {self.options.tokenizer_name!r}; another one made it"
            )
        return TokenisedText(np.array(sample.token_ids, np.int32), np.array(sample.trained, np.bool_))

    def _fit(self, text: TokenisedText, num_typed: int = 0, num_dropped: int = 0) -> TokenizedSample:
        length, limit, policy = len(text.token_ids), self.options.max_tokens, self.options.too_long
        had_labels = bool(text.trained[1:].any())
        dropped = 0
        rows: tuple[TokenisedText, ...] = ()
        fate: Fate = "kept"
        if not had_labels:
            fate = "no_labels"
        elif limit is None or length <= limit:
            rows = (_window(text, 0, length),)
        elif policy in ("error", "drop"):
            fate = "too_long"
        else:
            ends = [limit] if policy == "truncate" else range(limit, length + limit, limit)
            windows = [_window(text, end - limit, end) for end in ends]
            rows = tuple(window for window in windows if window.trained.any())
            dropped = len(windows) - len(rows)
            fate = "lost_labels" if not rows else "truncated" if policy == "truncate" else "split"
        return TokenizedSample(rows, fate, length, num_typed, num_dropped, dropped)


def _window(text: TokenisedText, start: int, end: int) -> TokenisedText:
    trained: NDArray[np.bool_] = text.trained[start:end].copy()
    trained[:1] = False
    return TokenisedText(text.token_ids[start:end], trained)
