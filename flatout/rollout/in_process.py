"""Sample in this process over the weights that are there, in the fastest backend that is exact for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from flatout.errors import NumericError, PackingError, ResourceError, UsageError, first_line
from flatout.models.arch_quirks import picture_kinds, whole_document_problem
from flatout.models.probe import MODEL_ERRORS
from flatout.models.selftest import own_attention
from flatout.planner.steps.packing import row_length
from flatout.rollout.backends import DecodeBackend, OwnCache, Recomputed, last_rows_of, open_slots
from flatout.rollout.decode import MIN_RECORDED_TOKENS, Decoding, PendingCompletion, Places, at_temperature
from flatout.rollout.sampler import Completion, Ending, OnAnswer, OnToken, SamplingParams, followed, pictures_of
from flatout.rollout.sampler_model import SamplerModel

BackendName = Literal["slots", "own cache", "recomputed"]
# tokens at the end of an answer whose log-probabilities are compared
NUM_COMPARED = 64
# tokens of a prompt and of its answer in `prove`
PROVED_TOKENS, PROVED_ANSWER = 128, 4


@dataclass
class _TokenListener:
    """Calls what a caller gets tokens and answers by, and remembers that it failed, which is no fault of a backend."""

    on_token: OnToken | None
    on_answer: OnAnswer | None
    failed: bool = False

    def __call__(self, answer: PendingCompletion, token_id: int) -> None:
        try:
            if self.on_token is not None:
                self.on_token(answer.prompt, answer.completion, token_id)
            if self.on_answer is not None and answer.ending is not None:
                self.on_answer(answer.prompt, answer.completion, answer.completion_value)
        except Exception:
            self.failed = True
            raise


@dataclass(frozen=True, slots=True)
class _KeptSlots:
    """Slots between calls, what they were opened for, and where the weights lay that recorded steps read."""

    places: Places
    num_answers: int
    longest: int
    draws: SamplingParams
    addresses: Sequence[int]

    def fit(self, num_answers: int, longest: int, draws: SamplingParams, addresses: Sequence[int]) -> bool:
        is_same = self.draws == draws and self.addresses == addresses
        return is_same and num_answers <= self.num_answers and longest <= self.longest


@dataclass
class InProcess:
    """Continues prompts with weights in this process, which may change between calls: no copy of them is made.

    Slots are taken where layers keep only keys and values, else transformers' own cache. Each backend is compared with
    passes without a cache once, and given up if it differs. Every rank calls a sampler alike.
    """

    model: SamplerModel
    records: bool = True
    """Record steps in slots on a GPU as CUDA graphs."""
    known: dict[BackendName, bool] = field(default_factory=dict)
    """Which backends are exact for the model, as far as they were compared."""
    keeps_slots: bool = False
    """Keep slots and their recorded steps for later calls, until `release`; a call that they do not fit opens others.

    Steps are recorded again in each call under autocast, which keeps copies of weights for one call, and where weights
    have moved. Nothing is kept in lockstep.
    """
    slot_length: int = 0
    """Kept slots have room for at least so many tokens of an answer with its prompt."""
    _kept: _KeptSlots | None = field(default=None, init=False, repr=False)

    def sample(
        self, prompts: Sequence[Sequence[int]], num_completions: int, params: SamplingParams,
        on_token: OnToken | None = None, prompt_numbers: Sequence[int] | None = None,
        on_answer: OnAnswer | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """Return `num_completions` of each prompt, which has at least one token and may be a `PicturePrompt`.

        Draws depend on `prompt_numbers`, one for each prompt, from 0 on by default: ranks that sample shares of the
        prompts give their numbers among all. `on_token` and `on_answer` get a prompt's index in this call. Call it
        without gradients, in eval mode and the model's autocast. Raises UsageError for a prompt that leaves no
        position, and NoRoomError if one answer needs more memory than is free.
        """
        if not prompts or not num_completions:
            return [[] for _ in prompts]
        listener = _TokenListener(on_token, on_answer)
        if self.model.pictures is not None:
            # it stands for a part of a picture, and an answer has none
            params = replace(params, never_ids=frozenset({self.model.pictures.token_id}))
        for name in self._usable_backends(len(prompts) * num_completions):
            answers = begin(prompts, num_completions, params, prompt_numbers)
            flat = [answer for group in answers for answer in group]
            try:
                with self._opened(name, flat, params) as places:
                    Decoding(places, flat, params, listener).finish()
                why = self._difference(name, flat, params.temperature)
            except (torch.OutOfMemoryError, ResourceError, NumericError):
                raise
            except (PackingError, UsageError, *MODEL_ERRORS) as error:
                if name == "recomputed" or listener.failed:
                    raise
                why = first_line(error)
            if why is None:
                return [[answer.completion_value for answer in group] for group in answers]
            self.known[name], self._kept = False, None
            if name == "own cache":
                self.model.log(
                    f"every token computes its prompt again, as this model has no cache that is exact: {why}"
                )
        raise AssertionError("the last backend is always usable")

    def prove(self, prompts: Sequence[Sequence[int]]) -> None:
        """Find the backend for as many prompts by a few tokens, before answers are shown that might be given up."""
        backend, *_ = self._usable_backends(len(prompts))
        if backend != "recomputed" and backend not in self.known:
            # of each text the end, which leaves positions for an answer
            texts = [prompt[-PROVED_TOKENS:] for prompt in prompts[:2] if not pictures_of(prompt)]
            ends = [text[len(text) // 2 :] for text in texts]
            self.sample(ends or prompts[:1], 1, SamplingParams(PROVED_ANSWER))

    def _usable_backends(self, num_answers: int) -> list[BackendName]:
        model, backends = self.model, list[BackendName]()
        fits = not model.prefers_own_cache or num_answers > 1
        config = model.pretrained.config.get_text_config()
        both_ways = model.pictures is not None and picture_kinds(config) is not None
        if model.packed_context is not None and fits and not both_ways and whole_document_problem(config) is None:
            backends.append("slots")
        return [name for name in (*backends, "own cache", "recomputed") if self.known.get(name, True)]

    def release(self) -> bool:
        """Free the memory of kept slots and their recorded steps; return whether there were any."""
        had_slots, self._kept = self._kept is not None, None
        if had_slots and self.model.device.type == "cuda":
            # graphs have memory of their own, which no tensor outside of them gets before
            torch.cuda.empty_cache()
        return had_slots

    @contextmanager
    def _opened(
        self, name: BackendName, answers: Sequence[PendingCompletion], params: SamplingParams
    ) -> Iterator[Places]:
        """Yield places for answers in a backend, with the attention that it needs."""
        model, longest = self.model, max(len(answer.prompt_ids) + answer.limit for answer in answers)
        if name == "slots" and model.packed_context is not None:
            with model.packed_context():
                slots = self._slots_for(answers, longest, params)
                yield slots.places
                if self._keeps:
                    if slots.places.recorded and torch.is_autocast_enabled(model.device.type):
                        slots.places.recorded.forget()
                    self._kept = slots
            return
        is_cached = name == "own cache"
        backend: DecodeBackend = OwnCache(model) if is_cached else Recomputed(model)
        with own_attention(model.pretrained) if is_cached else nullcontext():
            yield Places(backend, len(answers), longest, params, model, records=False)

    @property
    def _keeps(self) -> bool:
        return self.keeps_slots and not self.model.in_lockstep

    def _slots_for(self, answers: Sequence[PendingCompletion], longest: int, params: SamplingParams) -> _KeptSlots:
        """Take the kept slots if they fit a call, otherwise others."""
        model, (kept, self._kept) = self.model, (self._kept, None)
        # what a step computes does not depend on these
        draws = replace(params, max_new_tokens=1, seed=0, stop_ids=frozenset(), max_positions=None)
        weights = chain(model.pretrained.parameters(), model.pretrained.buffers()) if self._keeps else ()
        addresses = [tensor.data_ptr() for tensor in weights]
        if kept and kept.fit(len(answers), longest, draws, addresses):
            kept.places.clear(params)
            return kept
        # their memory is free before others are opened
        kept = None
        longest = max(longest, self.slot_length if self._keeps else 0)
        records = self.records and (self._keeps or max(answer.limit for answer in answers) >= MIN_RECORDED_TOKENS)
        slots, num_slots = open_slots(model, len(answers), longest, answers[0].prompt_ids[0])
        places = Places(slots, num_slots, longest, params, model, records=records)
        return _KeptSlots(places, len(answers), longest, draws, addresses)

    def _difference(self, name: BackendName, answers: Sequence[PendingCompletion], temperature: float) -> str | None:
        """Return how the longest answer differs from a pass without a cache; None if it does not, or was compared."""
        if name == "recomputed" or name in self.known:
            return None
        longest = max(answers, key=lambda answer: len(answer.token_ids))
        logprobs = torch.tensor(longest.logprobs[-NUM_COMPARED:], dtype=torch.float64)
        sequence = followed(longest.prompt_ids, longest.token_ids)
        true = packed_logprobs(self.model, sequence, len(logprobs), temperature).double().cpu()
        # a low temperature multiplies differences of logits
        error, limit = float((logprobs - true).abs().mean()), self.model.tolerance / min(temperature or 1, 1)
        if not self.model.all_reduce_min(int(error <= limit)):
            return f"log-probabilities differ by {error:.1e} on average (limit {limit:.0e})"
        self.known[name] = True
        return None


def packed_logprobs(model: SamplerModel, sequence: Sequence[int], count: int, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities (count,) of the last tokens of a sequence by a pass without a cache.

    They are those of `Completion.logprobs` for answers drawn at this temperature.
    """
    padded = row_length(len(sequence)) if model.is_padded else None
    batch = last_rows_of([sequence], model, row_length=padded)
    rows = torch.arange(len(sequence) - count - 1, len(sequence) - 1, device=model.device)
    ids = batch.token_ids[rows + 1]
    logits = model.logits(replace(batch, label_rows=rows, label_ids=ids))
    return at_temperature(logits, temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def begin(
    prompts: Sequence[Sequence[int]], num_completions: int, params: SamplingParams,
    prompt_numbers: Sequence[int] | None = None,
) -> list[list[PendingCompletion]]:  # fmt: skip
    """Return the answers to sample, by prompt. Raises UsageError for a prompt without tokens or positions."""
    answers, numbers = [], range(len(prompts)) if prompt_numbers is None else prompt_numbers
    for index, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
        room = params.max_new_tokens
        if params.max_positions is not None:
            room = min(room, params.max_positions - len(prompt))
        if not prompt or room < 1:
            has = f"{len(prompt):,} tokens, and the model {params.max_positions:,} positions" if prompt else "no tokens"
            raise UsageError(f"prompt {index + 1} has {has}; shorten it, or leave it out")
        at_limit: Ending = "length" if room == params.max_new_tokens else "positions"
        drawn = range(num_completions)
        answers.append([PendingCompletion(index, number, completion, prompt, room, at_limit) for completion in drawn])
    return answers
