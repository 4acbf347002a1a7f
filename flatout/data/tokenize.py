"""A sample -> its pieces, each with token ids and a loss mask, after the length policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import compress
from operator import or_
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.config.data import DataConfig
from flatout.data.columns import PREFIX_TOKENS
from flatout.data.conversation import PICTURE, Conversation, ParsedRow, PlainText, PreferenceRow, TokenRow, is_empty
from flatout.data.counts import LOSING, NOTHING, Fate, Outcome, Size
from flatout.data.encode import Encoder, TokenizedText, UnencodableError
from flatout.data.loss_mask.mask import MaskedText, Masker, complement
from flatout.data.loss_mask.probes import unknown_marker
from flatout.data.loss_mask.questions import masked_samples
from flatout.data.markup import noticed
from flatout.data.pictures.processor import Picture, PictureProcessor, expanded
from flatout.data.rows.formats.answers import CLASS
from flatout.data.templates.description import EARLIER, Problem, TemplateDescription
from flatout.data.templates.template import RENDER_ERRORS, ChatTemplate, choose_template, reads
from flatout.data.tokenizer import begins_with_bos, control_pattern, load_tokenizer
from flatout.errors import DataError, Fix, reason_of
from flatout.io.template_limits import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_MASKERS = 64


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """Everything that decides a sample's tokens."""

    tokenizer_name: str
    template_name: str
    template_source: str | None
    """None if there is no template to use."""
    settings: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """The tokens of one row."""

    pieces: tuple[TokenizedText, ...]
    """The samples that go into the store: several if the row is split or has several units, none if it is left out."""
    outcome: Outcome
    """What happened to the row."""
    unit_sizes: tuple[int, ...]
    """Samples of each unit; they add up to the number of pieces."""
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The values of each column, one after the other: of units, samples or tokens, as the column is per."""


class SampleTokenizer:
    """Turns samples into tokens. Only conversations need a template."""

    def __init__(self, options: TokenizeOptions, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Load the tokenizer unless one is given. Raises DataError."""
        self.options, self._settings = options, options.settings
        added = self._settings.added_tokens
        self.tokenizer = load_tokenizer(options.tokenizer_name, added=added) if tokenizer is None else tokenizer
        self.encoder = Encoder(self.tokenizer)
        self._control = control_pattern(self.tokenizer)
        # plain documents start with bos if the tokenizer itself starts every text with it
        self._bos = [int(self.tokenizer.bos_token_id)] if begins_with_bos(self.tokenizer) else []
        self.joins_texts = self._settings.special_tokens == "keep" and options.template_name == "plain"
        self.num_ids = max(len(self.tokenizer), self.tokenizer.vocab_size)
        self._maskers: dict[str, Masker] = {}  # of rows with variables of their own

    @property
    def masker(self) -> Masker:
        """The masker of the template. Raises DataError if there is no template, or if it ends no answer."""
        masker, options = self._masker, self._settings
        if not masker.stops.texts and options.end_of_turn is None and options.loss_type == "response_only":
            marker = unknown_marker(masker.template)
            other = f"; {marker!r} opens the next turn, but is no token of this tokenizer" if marker else ""
            raise DataError(
                f"chat template {masker.template.name!r}: nothing that it writes ends an answer, so a model would not "
                f"learn to stop{other}; name the text that ends one as data.end_of_turn",
                [Fix({"data.end_of_turn": "none"}, "trains without such a text")],
            )
        return masker

    @cached_property
    def _masker(self) -> Masker:
        options, name, source = self.options, self.options.template_name, self.options.template_source
        with bounded(f"chat template {name!r}"):
            if source is None:
                template = choose_template(self.tokenizer, None, options.tokenizer_name)
            else:
                template = ChatTemplate.checked(name, source, self.tokenizer, self._settings.template_args)
            return self._masker_of(template)

    def _masker_of(self, template: ChatTemplate) -> Masker:
        return Masker(
            template,
            self._settings.loss_type,
            self._control,
            mask_empty_reasoning=self._settings.empty_reasoning == "mask",
            end_of_turn=self._settings.end_of_turn,
        )

    def _masker_for(self, sample: Conversation) -> Masker:
        """Return the masker of a row's own variables. Raises DataError for one that the template does not read.

        An empty value of such a variable has no effect, so it may be there.
        """
        template = self.masker.template
        args = {k: v for k, v in sample.template_args.items() if v not in ("", [], {}) or reads(template.source, k)}
        mark = self._picture_mark(sample) if sample.pictures else ""
        if not args and not mark:
            return self.masker
        key = json.dumps([args, mark], sort_keys=True)
        if key not in self._maskers:
            if len(self._maskers) >= _MAX_MASKERS:
                self._maskers.clear()
            merged = {**template.args, **args}
            where = f"{sample.origin}: chat_template_kwargs"
            own = ChatTemplate.checked(template.name, template.source, self.tokenizer, merged, where)
            self._maskers[key] = self._masker_of(replace(own, mark=mark))
        return self._maskers[key]

    @cached_property
    def _pictures(self) -> PictureProcessor:
        return PictureProcessor(self.options.tokenizer_name, self.tokenizer)

    def _picture_mark(self, sample: Conversation) -> str:
        """Return what a template writes for a picture. Raises DataError without a processor, and if a text holds it."""
        try:
            processor = self._pictures
        except DataError as error:
            raise DataError(f"{sample.origin}: {sample.pictures[0].place} is a picture, but {error.text}") from None
        processor.require_no_mark((message.content for message in sample.messages), f"{sample.origin}: ")
        return processor.mark

    @cached_property
    def description(self) -> TemplateDescription:
        """What the template does, and what a user should know about it with this tokenizer."""
        masker = self._masker  # made within the limits too, which do not nest
        with bounded(f"chat template {self.options.template_name!r}"):
            description = masker.description
        # answers before the last question are in samples of their own, or carry no loss
        hidden = {EARLIER} if self._settings.lost_reasoning != "train" else set()
        problems = [problem for problem in description.problems if problem.answer not in hidden]
        for stop in description.stops:
            if (num_tokens := len(self.encoder.encode(stop, ()).token_ids)) > 1:
                problems.append(
                    Problem(
                        f"{stop!r}, which ends an answer, is {num_tokens} tokens in this tokenizer, not one",
                        "add it with data.new_special_tokens, or choose a template of this tokenizer's family",
                    )
                )
        if self._settings.empty_reasoning == "mask" and not description.empty_reasoning:
            problems.append(
                Problem(
                    "data.empty_reasoning=mask changes nothing: it writes no empty reasoning before an answer",
                    "remove the setting",
                )
            )
        return replace(description, problems=tuple(problems))

    def masked(self, sample: ParsedRow) -> Sequence[MaskedText]:
        """Return the texts of a conversation with what carries loss in them, for the call; () for another sample.

        Of a preference, these are one text for each answer. Raises DataError, also if there is no template.
        """
        if isinstance(sample, PreferenceRow):
            return [self._one_text(answer) for answer in sample.answers if isinstance(answer, Conversation)]
        if not isinstance(sample, Conversation):
            return ()
        if self.continues(sample):
            return [MaskedText("".join(message.content for message in sample.messages), (), (), ())]
        if self.joins_texts:
            return [self._as_it_stands(sample)]
        with bounded(f"{sample.origin}: chat template {self.masker.template.name!r}"):
            has_own = sample.template_args or sample.pictures
            masker = self._masker_for(sample) if has_own else self.masker
            if sample.is_prompt:
                return [MaskedText(_rendered(masker.template, sample), (), (), ())]
            return masked_samples(masker, sample, self._settings.lost_reasoning)

    def continues(self, sample: Conversation) -> bool:
        """Whether a prompt is a text that the model continues, as no template is applied."""
        is_text = self.options.template_source is None and len(sample.messages) == 1
        return sample.is_prompt and (is_text or self.joins_texts)

    def _as_it_stands(self, sample: Conversation) -> MaskedText:
        """Join the texts of a chat whose markers are read as tokens; bos and eos are those that a document gets."""
        bos, eos = (str(token or "") for token in (self.tokenizer.bos_token, self.tokenizer.eos_token))
        text = bos if self._bos and not sample.messages[0].content.startswith(bos) else ""
        spans = list[tuple[int, int]]()
        for place, message in enumerate(sample.messages):
            if message.tool_calls or message.reasoning or message.pictures or sample.tools:
                raise DataError(
                    f"{sample.origin}: messages[{place}]: special_tokens=keep with template=plain trains texts, but "
                    "the row has tools, reasoning or pictures beside them; write these into the texts"
                )
            is_answer = message.role == "assistant" or self._settings.loss_type == "all"
            if is_answer if message.train is None else message.train:
                learnt = complement(message.silent, len(message.content))
                spans += [(len(text) + start, len(text) + end) for start, end in learnt]
            text += message.content
        if not text.rstrip().endswith(eos):
            spans += [(len(text), len(text) + len(eos))] if spans and spans[-1][1] == len(text) else []
            text += eos
        # ranges that touch are one: a token may lie in both
        starts, ends = {start for start, _ in spans}, {end for _, end in spans}
        edges = zip(sorted(starts - ends), sorted(ends - starts), strict=True)
        return MaskedText(text, tuple(edges), (), ())

    def _one_text(self, answer: Conversation) -> MaskedText:
        texts = self.masked(answer)
        if len(texts) != 1:
            raise DataError(
                f"{answer.origin}: an answer holds several questions, before which the chat template writes earlier "
                "turns otherwise, and a part of it cannot be compared",
                [Fix({"data.lost_reasoning": how}) for how in ("mask", "train")],
            )
        return texts[0]

    def __call__(self, sample: ParsedRow, texts: Sequence[MaskedText] | None = None) -> TokenizedSample:
        """Tokenize one sample; its first token never carries loss, since nothing predicts it. Raises DataError.

        `texts` are those of `masked`, if it was called before.
        """
        try:
            if isinstance(sample, Conversation):
                return self._conversation(sample, self.masked(sample) if texts is None else texts)
            if isinstance(sample, PreferenceRow):
                return self._preference(sample, self.masked(sample) if texts is None else texts)
            if isinstance(sample, PlainText):
                if not sample.text.strip():
                    return TokenizedSample((), Outcome("no_labels", noticed=Counter(documents=1)), ())
                text, counts = self._document(sample)
                return self._fit(text, counts, is_document=not (sample.prompt or sample.silent))
        except UnencodableError as error:
            raise DataError(f"{sample.origin}: {error}") from None
        return self._tokens(sample)

    def _tokens(self, sample: TokenRow, *, is_whole: bool = False) -> TokenizedSample:
        ids, labels = sample.token_ids, sample.loss_mask
        if len(ids) != len(labels):
            raise DataError(
                f"{sample.origin}: {len(ids)} token ids but {len(labels)} label flags; the counts must match"
            )
        bad = next((i for i, token in enumerate(ids) if not 0 <= token < self.num_ids), None)
        if bad is not None:
            raise DataError(
                f"{sample.origin}: token id {ids[bad]} at position {bad} is outside 0..{self.num_ids - 1} "
                f"of tokenizer {self.options.tokenizer_name!r}; the row comes from a different tokenizer"
            )
        return self._fit(TokenizedText(np.array(ids, np.int32), np.array(labels, np.bool_)), is_whole=is_whole)

    def _preference(self, row: PreferenceRow, texts: Sequence[MaskedText]) -> TokenizedSample:
        """Tokenize each answer once, and put whole units together: one with an answer that is left out is left out."""
        if any(isinstance(answer, Conversation) and answer.pictures for answer in row.answers):
            raise DataError(f"{row.origin}: has pictures, and answers are compared on texts only; remove the row")
        if CLASS in row.columns:
            return self._classified(row, texts)
        if sampled := [self._tokens(answer, is_whole=True) for answer in row.answers if isinstance(answer, TokenRow)]:
            return _joined_units(row, sampled)
        pairs = zip(row.answers, texts, strict=True)
        answers = [
            self._conversation(answer, [text], is_whole=True) for answer, text in pairs
            if isinstance(answer, Conversation)
        ]  # fmt: skip
        return _joined_units(row, answers)

    def _classified(self, row: PreferenceRow, texts: Sequence[MaskedText]) -> TokenizedSample:
        """Tokenize a text with a label; its last token, which is scored, stands for it, and is its only label token.

        A text over the limit loses its end, unless `too_long` says otherwise.
        """
        (sample,), limit = row.answers, self._settings.max_tokens
        if isinstance(sample, PlainText):
            whole, counts = self._document(sample)
        else:
            assert isinstance(sample, Conversation)
            whole = self.encoder.encode(texts[0].text, (), texts[0].typed)
            counts = noticed(sample, texts[0].text, self._control)
            counts["typed_control_tokens"] = len(texts[0].typed)
        num_tokens, cuts = len(whole.token_ids), self._settings.too_long in ("auto", "truncate")
        ids = whole.token_ids[:limit] if cuts else whole.token_ids
        done = self._fit(TokenizedText(ids, np.arange(len(ids)) == len(ids) - 1), counts, is_whole=True)
        done.outcome.noticed["classified"] = len(done.pieces)
        if lost := num_tokens - len(ids):
            size = Size(num_tokens, done.outcome.size.labels)
            cut = replace(done.outcome, fate="truncated", num_tokens=num_tokens, size=size, lost=Size(lost, 0))
            done = replace(done, outcome=cut)
        return replace(done, columns=row.columns if done.pieces else {CLASS: ()})

    def _conversation(
        self, sample: Conversation, texts: Sequence[MaskedText], *, is_whole: bool = False
    ) -> TokenizedSample:
        policy = self._settings.lost_reasoning
        silent = [m for m in sample.messages if m.role == "assistant" and m.train is False]
        counts = {"empty_answers": sum(map(is_empty, silent))}
        counts |= noticed(sample, texts[-1].text if texts else "", self._control)
        learnt = (start <= typed < end for text in texts for typed, _ in text.typed for start, end in text.spans)
        counts["learnt_control"] = int(any(learnt))
        counts["unlike_prompt"] = sum(masked.num_unlike_prompt for masked in texts)
        if (inline := sum("</think>" in m.content for m in sample.messages if m.role == "assistant")) and texts:
            counts["reasoning_as_text"] = inline * self.masker.leaves_inline_reasoning
        if len(texts) > 1:
            counts |= {"split_by_question": 1, "questions": len(texts)}
        elif texts:
            counts["reasoning_masked" if policy == "mask" else "reasoning_dropped"] = len(texts[0].lost_reasoning)
        pictures: tuple[Picture, ...] = ()
        done = list[TokenizedSample]()
        if sample.pictures:
            if (num_shown := texts[-1].text.count(PICTURE) if texts else 0) != len(sample.pictures):
                raise DataError(
                    f"{sample.origin}: the chat template shows {num_shown} of {len(sample.pictures)} pictures; choose "
                    "one of the model's family (data.template)"
                )
            pictures = self._pictures.read(sample, self._settings.media_root)
            transparent = sum(picture.file.has_alpha for picture in pictures)
            counts |= {"pictures": len(pictures), "transparent_pictures": transparent}
        for masked in texts:
            seen = pictures[: masked.text.count(PICTURE)]
            shown = expanded(masked, [picture.standing.text for picture in seen]) if seen else masked
            text = replace(self.encoder.encode(shown.text, shown.spans, shown.typed), pictures=seen)
            if self._bos and self.continues(sample):
                ids = np.concatenate([np.array(self._bos, np.int32), text.token_ids])
                text = replace(text, token_ids=ids, loss_mask=np.zeros(len(ids), np.bool_))
            own, asks = counts if len(texts) == 1 else {}, sample.is_prompt
            own = {"typed_control_tokens": len(masked.typed), **own}
            done.append(self._fit(text, own, is_whole=is_whole or asks, is_prompt=asks))
        return done[0] if len(done) == 1 else _joined(done, counts)

    def _document(self, sample: PlainText) -> tuple[TokenizedText, dict[str, int]]:
        """Return a text as a whole, from bos to eos, and counts."""
        text = sample.prompt + sample.text
        keep = self._settings.special_tokens == "keep"
        typed = [match.span() for match in self._control.finditer(text)] if self._control and not keep else []
        before = len(sample.prompt)
        silent = [(0, before), *((before + start, before + end) for start, end in sample.silent)]
        spans = complement([] if self._settings.loss_type == "all" else silent, len(text))
        body = self.encoder.encode(text, spans, typed)
        if (eos := self.tokenizer.eos_token_id) is None:
            raise DataError(
                f"tokenizer {self.options.tokenizer_name!r} has no eos token to end plain documents; "
                "set eos_token in it"
            )
        # a text that already has its bos and eos does not get them again
        bos = [] if body.token_ids[:1].tolist() == self._bos else self._bos
        end = [] if keep and body.token_ids[-1:].tolist() == [eos] else [eos]
        ids = np.concatenate([np.array(bos, np.int32), body.token_ids, np.array(end, np.int32)])
        ends_with_loss = bool(spans) and spans[-1][1] == len(text)
        loss_mask = np.concatenate([np.zeros(len(bos), np.bool_), body.loss_mask, np.full(len(end), ends_with_loss)])
        counts = {"documents": 1, "typed_control_tokens": len(typed)}
        counts |= noticed(sample, skipped=self._control, template=self.options.template_source or "")
        return TokenizedText(ids, loss_mask), counts

    def _fit(
        self,
        text: TokenizedText,
        counts: Mapping[str, int] = MappingProxyType({}),
        *,
        is_document: bool = False,
        is_whole: bool = False,
        is_prompt: bool = False,
    ) -> TokenizedSample:
        """Apply the length policy; `counts` are what was noticed before."""
        length, limit, policy = len(text.token_ids), self._settings.max_tokens, self._settings.too_long
        if text.pictures and policy != "error":
            policy = "drop"  # a picture is not cut
        if policy == "auto":
            policy = "drop" if is_whole else "split" if is_document else "truncate"
        num_labels = int(np.count_nonzero(text.loss_mask[1:]))
        fate: Fate = "kept"
        windows: list[TokenizedText] = []
        if not num_labels and not is_prompt:
            fate = "no_labels"
        elif limit is not None and length > limit and policy in ("error", "drop"):
            fate = "too_long"
        else:
            window = length if limit is None else limit
            for start in range(0, length if policy == "split" else 1, window):
                loss_mask: NDArray[np.bool_] = text.loss_mask[start : start + window].copy()
                loss_mask[:1] = False  # nothing predicts it
                windows.append(TokenizedText(text.token_ids[start : start + window], loss_mask, text.pictures))
            if length > window:
                fate = "truncated" if policy == "truncate" else "split"
        pieces = tuple(window for window in windows if is_prompt or window.loss_mask.any())
        if windows and not pieces:
            fate = "lost_labels"
        size = Size(length, num_labels)
        lost = _without(size, pieces) if fate in LOSING else NOTHING
        seen = Counter(counts) + Counter(windows_without_labels=len(windows) - len(pieces))
        return TokenizedSample(pieces, Outcome(fate, length, size, lost, seen), (1,) * len(pieces))


def _rendered(template: ChatTemplate, sample: Conversation) -> str:
    """Return a prompt with what the template writes before an answer. Raises DataError."""
    try:
        return template.render(template.raw_messages(sample.messages), sample.tools, generation_prompt=True)
    except RENDER_ERRORS as error:
        raise DataError(
            f"{sample.origin}: chat template {template.name!r} cannot render it: {reason_of(error)}"
        ) from error


def _without(size: Size, pieces: Sequence[TokenizedText]) -> Size:
    num_labels = sum(int(np.count_nonzero(piece.loss_mask)) for piece in pieces)
    return Size(size.tokens - sum(len(piece.token_ids) for piece in pieces), size.labels - num_labels)


def _joined(samples: Sequence[TokenizedSample], counts: Mapping[str, int]) -> TokenizedSample:
    """Return the samples of one row as one; what any of them lost counts under the fate of the row."""
    outcomes = [sample.outcome for sample in samples]
    fates = {outcome.fate for outcome in outcomes}
    order: tuple[Fate, ...] = ("truncated", "split", "too_long", "lost_labels", "kept", "no_labels")
    fate: Fate = next((fate for fate in order if fate in fates), "no_labels")
    if fate == "lost_labels" and fates != {fate}:
        fate = "truncated"
    outcome = Outcome(
        fate,
        max((one.num_tokens for one in outcomes), default=0),
        reduce(Size.plus, (one.size for one in outcomes), NOTHING),
        reduce(Size.plus, (one.lost for one in outcomes), NOTHING),
        sum((one.noticed for one in outcomes), Counter(counts)),
    )
    pieces = tuple(piece for sample in samples for piece in sample.pieces)
    return TokenizedSample(pieces, outcome, (1,) * len(pieces))


def _joined_units(row: PreferenceRow, answers: Sequence[TokenizedSample]) -> TokenizedSample:
    """Return the units of a row as one sample; a unit with an answer that was left out is left out whole."""
    are_whole = [all(answers[place].pieces for place in unit) for unit in row.units]
    units = [unit for unit, is_whole in zip(row.units, are_whole, strict=True) if is_whole]
    texts = [[answers[place].pieces[0] for place in unit] for unit in units]
    is_group = isinstance(row.answers[0], TokenRow)
    if not is_group and any(len(unit) > 1 and np.array_equal(unit[0].token_ids, unit[1].token_ids) for unit in texts):
        raise DataError(f"{row.origin}: two answers are the same tokens, so neither is better; remove the row")
    pieces = tuple(text for unit in texts for text in unit)
    columns: dict[str, Sequence[float]] = {
        # a group is one unit, with values for each of its samples and tokens
        name: list(values) if is_group and units else list(compress(values, are_whole))
        for name, values in row.columns.items()
    }
    # an answer counts in each unit that has it, but what is found in the prompt, each answer of the row has
    asked = [answers[place].outcome for unit in row.units for place in unit]
    seen = reduce(or_, (answer.outcome.noticed for answer in answers))
    seen["typed_control_tokens"] = sum(outcome.noticed["typed_control_tokens"] for outcome in asked)
    if is_group or len(row.units[0]) > 1:
        columns[PREFIX_TOKENS] = [_prefix_tokens(unit) for unit in texts]
        what = "groups" if is_group else "pairs"
        seen.update({what: len(units), f"lost_{what}": len(row.units) - len(units)})
    else:
        seen.update(labelled=len(units), labelled_good=int(sum(columns.get("label", ()))))
    left_out = {answers[place].outcome.fate for unit in row.units for place in unit if unit not in units}
    fate: Fate = "too_long" if "too_long" in left_out else "no_labels" if "no_labels" in left_out else "kept"
    size = reduce(Size.plus, (outcome.size for outcome in asked))
    lost = _without(size, pieces) if fate == "too_long" else NOTHING
    outcome = Outcome(fate, max(answer.outcome.num_tokens for answer in answers), size, lost, seen)
    return TokenizedSample(pieces, outcome, tuple(map(len, units)), columns)


def _prefix_tokens(texts: Sequence[TokenizedText]) -> int:
    """Return how many tokens all texts begin with of which none is a label, or predicts one."""
    most = min(len(text.token_ids) for text in texts)
    ids = np.stack([text.token_ids[:most] for text in texts])
    stops = (ids != ids[0]).any(0)
    stops[:-1] |= np.any([text.loss_mask[1:most] for text in texts], 0)
    stops[-1] = True  # a sample has more than its prefix
    return int(stops.argmax())
