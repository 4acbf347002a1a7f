"""Sample in this process over the weights that are there, in the fastest backend that is exact for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from flatout.errors import NumericError, PackingError, ResourceError, UsageError, first_line
from flatout.models.arch_quirks import picture_kinds, whole_document_problem
from flatout.models.probe import MODEL_ERRORS
from flatout.models.selftest import own_attention
from flatout.planner.steps.packing import row_length
from flatout.rollout.backends import DecodeBackend, OwnCache, Recomputed, last_rows_of, open_slots
from flatout.rollout.decode import Decoding, PendingCompletion
from flatout.rollout.sampler import Completion, Ending, OnToken, SamplingParams, followed, pictures_of
from flatout.rollout.sampler_model import SamplerModel

BackendName = Literal["slots", "own cache", "recomputed"]
# tokens at the end of an answer whose log-probabilities are compared
NUM_COMPARED = 64
# tokens of a prompt and of its answer in `prove`
PROVED_TOKENS, PROVED_ANSWER = 128, 4


@dataclass
class _TokenListener:
    """Calls what a caller gets tokens by, and remembers that it failed, which is no fault of a backend."""

    on_token: OnToken | None
    failed: bool = False

    def __call__(self, prompt: int, completion: int, token_id: int) -> None:
        try:
            if self.on_token is not None:
                self.on_token(prompt, completion, token_id)
        except Exception:
            self.failed = True
            raise


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

    def sample(
        self, prompts: Sequence[Sequence[int]], num_completions: int, params: SamplingParams,
        on_token: OnToken | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """Return `num_completions` of each prompt, which has at least one token and may be a `PicturePrompt`.

        Call it without gradients, in eval mode and the model's autocast. Raises UsageError for a prompt that leaves no
        position, and NoRoomError if one answer needs more memory than is free.
        """
        if not prompts or not num_completions:
            return [[] for _ in prompts]
        listener = _TokenListener(on_token)
        if self.model.pictures is not None:
            # it stands for a part of a picture, and an answer has none
            params = replace(params, never_ids=frozenset({self.model.pictures.token_id}))
        for name in self._usable_backends(len(prompts) * num_completions):
            answers = begin(prompts, num_completions, params)
            flat = [answer for group in answers for answer in group]
            try:
                with self._opened(name, flat) as (backend, num_places):
                    Decoding(backend, num_places, flat, params, self.model, listener, records=self.records).finish()
                why = self._difference(name, flat)
            except (torch.OutOfMemoryError, ResourceError, NumericError):
                raise
            except (PackingError, UsageError, *MODEL_ERRORS) as error:
                if name == "recomputed" or listener.failed:
                    raise
                why = first_line(error)
            if why is None:
                return [[answer.completion_value for answer in group] for group in answers]
            self.known[name] = False
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

    @contextmanager
    def _opened(self, name: BackendName, answers: Sequence[PendingCompletion]) -> Iterator[tuple[DecodeBackend, int]]:
        """Yield a backend, and for how many answers at once it has places, with the attention that it needs."""
        model = self.model
        if name == "slots" and model.packed_context is not None:
            with model.packed_context():
                longest = max(len(answer.prompt_ids) + answer.limit for answer in answers)
                yield open_slots(model, len(answers), longest, answers[0].prompt_ids[0])
        elif name == "own cache":
            with own_attention(model.pretrained):
                yield OwnCache(model), len(answers)
        else:
            yield Recomputed(model), len(answers)

    def _difference(self, name: BackendName, answers: Sequence[PendingCompletion]) -> str | None:
        """Return how the longest answer differs from a pass without a cache; None if it does not, or was compared."""
        if name == "recomputed" or name in self.known:
            return None
        longest = max(answers, key=lambda answer: len(answer.token_ids))
        logprobs = torch.tensor(longest.logprobs[-NUM_COMPARED:], dtype=torch.float64)
        true = (
            packed_logprobs(self.model, followed(longest.prompt_ids, longest.token_ids), len(logprobs)).double().cpu()
        )
        error, limit = float((logprobs - true).abs().mean()), self.model.tolerance
        if not self.model.all_reduce_min(int(error <= limit)):
            return f"log-probabilities differ by {error:.1e} on average (limit {limit:.0e})"
        self.known[name] = True
        return None


def packed_logprobs(model: SamplerModel, sequence: Sequence[int], count: int) -> Tensor:
    """Return the log-probabilities (count,) of the last tokens of a sequence by a pass without a cache."""
    padded = row_length(len(sequence)) if model.is_padded else None
    batch = last_rows_of([sequence], model, row_length=padded)
    rows = torch.arange(len(sequence) - count - 1, len(sequence) - 1, device=model.device)
    ids = batch.token_ids[rows + 1]
    logits = model.logits(replace(batch, label_rows=rows, label_ids=ids))
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def begin(
    prompts: Sequence[Sequence[int]], num_completions: int, params: SamplingParams
) -> list[list[PendingCompletion]]:
    """Return the answers to sample, by prompt. Raises UsageError for a prompt without tokens or positions."""
    answers = []
    for index, prompt in enumerate(prompts):
        room = params.max_new_tokens
        if params.max_positions is not None:
            room = min(room, params.max_positions - len(prompt))
        if not prompt or room < 1:
            has = f"{len(prompt):,} tokens, and the model {params.max_positions:,} positions" if prompt else "no tokens"
            raise UsageError(f"prompt {index + 1} has {has}; shorten it, or leave it out")
        at_limit: Ending = "length" if room == params.max_new_tokens else "positions"
        answers.append([PendingCompletion(index, number, prompt, room, at_limit) for number in range(num_completions)])
    return answers
