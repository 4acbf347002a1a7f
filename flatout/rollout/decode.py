"""The loop of a sampler: begin answers where there are places, draw a token of each, end those that are done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from flatout.errors import Fix, NumericError
from flatout.optim.update import copy_to_host_async
from flatout.rollout.answers import DecodeState, PendingCompletion
from flatout.rollout.backends import DecodeBackend, Slots
from flatout.rollout.cuda_graphs import RecordedSteps, recorded_size
from flatout.rollout.sampler import OnToken, SamplingParams
from flatout.rollout.sampler_model import SamplerModel

# shorter answers end before recording pays
MIN_RECORDED_TOKENS = 32
# on a GPU, places of ended answers are given to others once they are this share
_REFILL_SHARE = 16


class Decoding:
    """One call of a sampler. On a GPU the host reads tokens one step late, so that the device never waits for it.

    An answer that has ended meanwhile takes part in one more step, whose token is dropped. Steps in slots on a GPU are
    made for a few numbers of places, and with `records` recorded as CUDA graphs.
    """

    def __init__(
        self, backend: DecodeBackend, num_places: int, answers: Sequence[PendingCompletion], params: SamplingParams,
        model: SamplerModel, on_token: OnToken | None, *, records: bool,
    ) -> None:  # fmt: skip
        self._backend, self._num_places, self._params, self._on_token = backend, num_places, params, on_token
        self._longest = max(len(answer.prompt_ids) + answer.limit for answer in answers)
        # answers of one prompt, and prompts of one length, come one after the other
        order = answers if backend.mixes else sorted(answers, key=lambda item: (len(item.prompt_ids), item.prompt))
        self._waiting, self._active = deque(order), list[PendingCompletion]()
        self._state = DecodeState(num_places, self._longest, params, model.device, model.broadcast_tokens)
        self._lag = int(model.device.type == "cuda" and not model.in_lockstep)
        self._refill = max(1, num_places // _REFILL_SHARE) if self._lag else 1
        self._unread: deque[tuple[list[PendingCompletion], Callable[[], list[float]]]] = deque()
        self._recorded = None
        if self._lag and isinstance(backend, Slots):
            records = records and max(answer.limit for answer in answers) >= MIN_RECORDED_TOKENS
            self._recorded = RecordedSteps(self._step, model.device, model.log, records=records)

    def finish(self) -> None:
        """Sample all answers to their ends. Raises NumericError for a log-probability that is not finite."""
        while self._waiting or self._active:
            if not self._begin_waiting():
                if self._recorded is None:
                    self._step(len(self._active))
                else:
                    self._recorded(recorded_size(len(self._active), self._num_places))
                self._copy(0)
            self._read(self._lag)
            self._leave_places()
            if self._active and all(answer.num_drawn >= answer.limit for answer in self._active):
                self._read(0)
                self._leave_places()
        self._read(0)

    def _begin_waiting(self) -> bool:
        """Begin answers at free places; return whether any did."""
        free = self._num_places - len(self._active)
        if not self._waiting or (self._active and (not self._backend.mixes or free < self._refill)):
            return False
        chosen = [self._waiting.popleft()]
        while self._waiting and len(chosen) < free:
            if not self._backend.mixes and len(self._waiting[0].prompt_ids) != len(chosen[0].prompt_ids):
                break
            chosen.append(self._waiting.popleft())
        groups = [list(group) for _, group in groupby(chosen, key=lambda answer: answer.prompt)]
        logits = self._backend.admit([(group[0].prompt_ids, len(group)) for group in groups])
        counts = torch.tensor([len(group) for group in groups], device=logits.device)
        first = len(self._active)
        self._active += chosen
        self._state.begin(chosen, first, logits.repeat_interleave(counts, dim=0, output_size=len(chosen)))
        self._copy(first)
        return True

    def _step(self, num_places: int) -> None:
        """Draw the next token at the first places."""
        state, places = self._state, slice(0, num_places)
        longest = self._longest
        if self._recorded is None:
            longest = max(len(answer.prompt_ids) + answer.num_drawn for answer in self._active)
        logits = self._backend.step(state.tokens[places], state.positions[places], longest)
        state.draw(logits, places)
        # those of ended answers stay where they have room
        state.positions[places].add_(1).clamp_(max=state.last_position)

    def _copy(self, first: int) -> None:
        """Start copying what was drawn at the places from `first` on."""
        answers, state = self._active[first:], self._state
        for answer in answers:
            answer.num_drawn += 1
        places = slice(first, len(self._active))
        both = torch.cat([state.tokens[places].double(), state.logprobs[places]])
        self._unread.append((answers, copy_to_host_async(both)[0]))

    def _read(self, lag: int) -> None:
        """Give answers the tokens of all steps but the last `lag`."""
        while len(self._unread) > lag:
            answers, read = self._unread.popleft()
            values = read()
            for answer, token_id, logprob in zip(answers, values[: len(answers)], values[len(answers) :], strict=True):
                if answer.ending is not None:
                    continue
                if not math.isfinite(logprob):
                    raise NumericError(
                        f"a token of the answer to prompt {answer.prompt + 1} has the log-probability {logprob}",
                        [Fix({"model.precision": "fp32"}, "unless the weights are damaged")],
                    )
                answer.add(int(token_id), logprob, self._params.stop_ids)
                if self._on_token is not None:
                    self._on_token(answer.prompt, answer.completion, int(token_id))

    def _leave_places(self) -> None:
        """Move answers so that those going on have the first places; on a GPU only once that helps."""
        active = self._active
        count = sum(answer.ending is None for answer in active)
        if count == len(active):
            return
        if self._recorded is not None and count:
            is_smaller = recorded_size(count, self._num_places) < recorded_size(len(active), self._num_places)
            refills = bool(self._waiting) and len(active) - count >= self._refill
            if not (is_smaller or refills):
                return
        free = [place for place in range(count) if active[place].ending is not None]
        late = [place for place in range(count, len(active)) if active[place].ending is None]
        pairs = list(zip(late, free, strict=True))
        for old, new in pairs:
            active[new] = active[old]
        del active[count:]
        if pairs:
            self._state.move(pairs)
        self._backend.move(pairs, count)
