"""The loop of a sampler: begin answers where there are places, draw a token of each, end those that are done."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.errors import Fix, NumericError, first_line
from flatout.models.compile.cuda_graphs import recording
from flatout.optim.update import copy_to_host_async
from flatout.rollout.backends import DecodeBackend, Slots
from flatout.rollout.sampler import Completion, Ending, SamplingParams
from flatout.rollout.sampler_model import SamplerModel

# shorter answers end before recording pays
MIN_RECORDED_TOKENS = 32
# on a GPU, places of ended answers are given to others once they are this share
_REFILL_SHARE = 16
# places of the smallest recorded step
SMALLEST = 16
# one for all recordings of a process, as each stream keeps a workspace
_stream = cache(torch.cuda.Stream)
_LOW = (1 << 32) - 1
_WHOLE, _BLOCK, _MIN_BLOCK = float(1 << 48), 1024, 64


@dataclass(slots=True)
class PendingCompletion:
    """An answer on the host. `num_drawn` counts tokens that the device has drawn, read or not.

    `prompt` is the prompt's index in the call, `prompt_number` the number that its draws depend on.
    """

    prompt: int
    prompt_number: int
    completion: int
    prompt_ids: Sequence[int]
    limit: int
    at_limit: Ending
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ending: Ending | None = None
    num_drawn: int = 0

    def add(self, token_id: int, logprob: float, stop_ids: frozenset[int]) -> None:
        """Append what was drawn, and end where it says so."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in stop_ids:
            self.ending = "stop"
        elif len(self.token_ids) == self.limit:
            self.ending = self.at_limit

    @property
    def completion_value(self) -> Completion:
        assert self.ending is not None
        return Completion(tuple(self.token_ids), tuple(self.logprobs), self.ending)


class DecodeState:
    """What the device knows of each place: the newest token, its position, and what its draws depend on.

    `broadcast_tokens` returns the first rank's tokens.
    """

    def __init__(
        self, num_places: int, length: int, params: SamplingParams, device: torch.device,
        broadcast_tokens: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.params, self._broadcast_tokens, self.last_position = params, broadcast_tokens, length - 1
        integers = [torch.zeros(num_places, dtype=torch.int64, device=device) for _ in range(4)]
        self.tokens, self.positions, self._counts, self._keys = integers
        self.logprobs = torch.zeros(num_places, dtype=torch.float64, device=device)
        # made with the first logits, which say how many tokens there are
        self._seen: Tensor | None = None

    def begin(self, answers: Sequence[PendingCompletion], first: int, logits: Tensor) -> None:
        """Draw the first token of answers at places from `first` on; logits (answers, V)."""
        device, places = logits.device, slice(first, first + len(answers))
        # 62 bits for all draws of a completion
        drawn_by = (f"{self.params.seed} {answer.prompt_number} {answer.completion}" for answer in answers)
        hashes = (hashlib.blake2b(one.encode(), digest_size=8).digest() for one in drawn_by)
        keys = [int.from_bytes(one, "big") >> 2 for one in hashes]
        self._keys[places] = torch.tensor(keys, device=device)
        self._counts[places] = 0
        self.positions[places] = torch.tensor([len(answer.prompt_ids) for answer in answers], device=device)
        if self.params.repetition_penalty != 1:
            if self._seen is None:
                shape = len(self.tokens), logits.shape[-1]
                self._seen = torch.zeros(shape, dtype=torch.bool, device=device)
            for place, answer in enumerate(answers, start=first):
                self._seen[place] = False
                self._seen[place, torch.tensor(list(answer.prompt_ids), device=device)] = True
        self.draw(logits, places)

    def draw(self, logits: Tensor, places: slice) -> None:
        """Draw a token at these places; nothing waits for the device."""
        seen = None if self._seen is None else self._seen[places]
        chosen, logprobs = choose(logits, self.params, self._keys[places], self._counts[places], seen)
        chosen = self._broadcast_tokens(chosen)
        self.tokens[places] = chosen
        self.logprobs[places] = logprobs.double()
        self._counts[places] += 1
        if seen is not None:
            seen.scatter_(1, chosen[:, None], True)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy places (from, to)."""
        old, new = (torch.tensor(side, device=self.tokens.device) for side in zip(*pairs, strict=True))
        tensors = [self.tokens, self.positions, self._counts, self._keys, self.logprobs]
        for tensor in tensors if self._seen is None else [*tensors, self._seen]:
            tensor[new] = tensor[old]


class RecordedSteps:
    """Calls `step(num_places)`, which must read and write the same addresses each time and never wait for the device.

    The first call for a number of places runs plainly, which also loads kernels; the second records. Without `records`,
    all run plainly, and so they do if recording fails, which `log` says once: results are the same.
    """

    def __init__(
        self, step: Callable[[int], None], device: torch.device, log: Callable[[str], None], *, records: bool
    ) -> None:
        self._step, self._log = step, log
        self._stream = _stream(device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._records = records

    def __call__(self, num_places: int) -> None:
        if not self._records or num_places not in self._graphs:
            self._graphs[num_places] = None
            self._plain(num_places)
            return
        graph = self._graphs[num_places] or self._record(num_places)
        if graph is None:
            self._plain(num_places)
        else:
            graph.replay()

    def forget(self) -> None:
        """Drop what was recorded."""
        self._graphs.clear()

    def _plain(self, num_places: int) -> None:
        """Run a step on the stream that records, so that its workspaces exist before."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(num_places)
        current.wait_stream(self._stream)

    def _record(self, num_places: int) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._stream):
                self._step(num_places)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._records = False
            self._log(f"decoding steps cannot be recorded as CUDA graphs: {first_line(error)}")
            return None
        self._graphs[num_places] = graph
        return graph


def recorded_size(num_answers: int, num_places: int) -> int:
    """Return the places of the step that computes so many answers: few sizes, so that few graphs are recorded."""
    return min(max(SMALLEST, 1 << (num_answers - 1).bit_length()), num_places)


class Places:
    """A backend's places for answers of up to `longest` tokens with their prompts, for one call or several.

    Steps in slots on a GPU are made for a few numbers of places, and with `records` recorded as CUDA graphs.
    """

    def __init__(
        self, backend: DecodeBackend, num_places: int, longest: int, params: SamplingParams, model: SamplerModel,
        *, records: bool,
    ) -> None:  # fmt: skip
        self.backend, self.num_places = backend, num_places
        self.state = DecodeState(num_places, longest, params, model.device, model.broadcast_tokens)
        self.lag = int(model.device.type == "cuda" and not model.in_lockstep)
        """Steps by which the host reads tokens late."""
        self.recorded: RecordedSteps | None = None
        if self.lag and isinstance(backend, Slots):
            step = partial(_draw_next, backend, self.state, longest)
            self.recorded = RecordedSteps(step, model.device, model.log, records=records)

    def clear(self, params: SamplingParams) -> None:
        """Free all places for another call, with `params` by which steps compute the same."""
        self.state.params = params
        self.backend.move([], 0)


def _draw_next(backend: DecodeBackend, state: DecodeState, longest: int, num_places: int) -> None:
    """Draw the next token at the first places."""
    places = slice(0, num_places)
    logits = backend.step(state.tokens[places], state.positions[places], longest)
    state.draw(logits, places)
    # those of ended answers stay where they have room
    state.positions[places].add_(1).clamp_(max=state.last_position)


class Decoding:
    """One call of a sampler. On a GPU the host reads tokens one step late, so that the device never waits for it.

    An answer that has ended meanwhile takes part in one more step, whose token is dropped.
    """

    def __init__(
        self,
        places: Places,
        answers: Sequence[PendingCompletion],
        params: SamplingParams,
        on_token: Callable[[PendingCompletion, int], None],
    ) -> None:
        self._backend, self._num_places, self._params, self._on_token = (
            places.backend, places.num_places, params, on_token
        )  # fmt: skip
        self._state, self._recorded, self._lag = places.state, places.recorded, places.lag
        # answers of one prompt, and prompts of one length, come one after the other
        is_mixed = self._backend.mixes
        order = answers if is_mixed else sorted(answers, key=lambda item: (len(item.prompt_ids), item.prompt))
        self._waiting, self._active = deque(order), list[PendingCompletion]()
        self._refill = max(1, self._num_places // _REFILL_SHARE) if self._lag else 1
        self._unread: deque[tuple[list[PendingCompletion], Callable[[], list[float]]]] = deque()

    def finish(self) -> None:
        """Sample all answers to their ends. Raises NumericError for a log-probability that is not finite."""
        while self._waiting or self._active:
            if not self._begin_waiting():
                if self._recorded is None:
                    longest = max(len(answer.prompt_ids) + answer.num_drawn for answer in self._active)
                    _draw_next(self._backend, self._state, longest, len(self._active))
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
                self._on_token(answer, int(token_id))

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


def uniform(keys: Tensor, counts: Tensor) -> Tensor:
    """Return fp64 numbers in [0, 1) with 53 random bits, the same on every device; int64 arguments of one shape."""
    first = _mixed((keys & _LOW) ^ _mixed((keys >> 32) ^ _mixed(counts & _LOW)))
    second = _mixed(first ^ _mixed((keys + 0x9E3779B9) & _LOW))
    return (first * (1 << 21) + (second >> 11)).double() * 2.0**-53


def _mixed(values: Tensor) -> Tensor:
    """Permute numbers of 32 bits, in int64, by the hash lowbias32 of hash-prospector."""
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & _LOW
    # products wrap around; their low bits are right
    values = ((values ^ (values >> 15)) * 0x846CA68B) & _LOW
    return values ^ (values >> 16)


def choose(
    logits: Tensor, params: SamplingParams, keys: Tensor, counts: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a token of each row of logits (N, V), int64 (N,), and its log-probability in the logits' dtype.

    The log-probability is that of `Completion.logprobs`. `keys` and `counts` int64 (N,) decide the draws; `seen` bool
    (N, V) are tokens for the repetition penalty.
    """
    scores, scaled = logits, at_temperature(logits, params.temperature)
    if params.never_ids:
        scores = scores.clone()
        for token_id in params.never_ids:
            scores[:, token_id] = float("-inf")
    if seen is not None:
        penalty = params.repetition_penalty
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if params.temperature == 0:
        chosen, log_total = scores.argmax(-1), scaled.logsumexp(-1)
    else:
        scores = _cut(scaled if scores is logits else at_temperature(scores, params.temperature), params)
        sums = _in_blocks(scores).logsumexp(-1)
        chosen = _first_beyond(scores, sums, uniform(keys, counts)[:, None])
        log_total = (sums if scores is scaled else scaled).logsumexp(-1)
    return chosen, scaled.gather(-1, chosen[:, None])[:, 0] - log_total


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return logits whose softmax is what tokens are drawn from before cuts; at temperature 0 (greedy), the model's."""
    return logits if temperature in (0, 1) else logits / temperature


def _in_blocks(scores: Tensor) -> Tensor:
    """Return scores (N, V) as (N, V / B, B), without a copy for sizes of a vocabulary that are multiples of 64."""
    size = math.gcd(scores.shape[-1], _BLOCK)
    if size < _MIN_BLOCK:
        size = _BLOCK
        scores = F.pad(scores, (0, -scores.shape[-1] % size), value=float("-inf"))
    blocks: Tensor = scores.unflatten(-1, (-1, size))
    return blocks


def _first_beyond(scores: Tensor, block_sums: Tensor, numbers: Tensor) -> Tensor:
    """Return the first token at which the sum of probabilities exceeds numbers (N, 1) in [0, 1), int64 (N,).

    Finds its block by `block_sums`, the logsumexp of each block of scores (N, V), then the token in the block, so that
    the scores are read once. Sums are of integers, parts of 2^-48, as those of floats depend on the order.
    """

    def running_sums(logs: Tensor) -> Tensor:
        return ((logs - log_total).double().exp() * _WHOLE).long().cumsum(-1)

    blocks, log_total = _in_blocks(scores), block_sums.logsumexp(-1, keepdim=True)
    sums = running_sums(block_sums)
    bounds = (numbers * sums[:, -1:]).long()
    block = torch.searchsorted(sums, bounds, right=True).clamp(max=sums.shape[-1] - 1)
    before = F.pad(sums, (1, 0)).gather(-1, block)
    size = blocks.shape[-1]
    inner = running_sums(blocks.gather(1, block[..., None].expand(-1, 1, size))[:, 0])
    # parts are rounded down, so those of a block's tokens may be fewer than the block's
    offset = torch.searchsorted(inner, torch.minimum(bounds - before, inner[:, -1:] - 1), right=True)
    # scores that are not finite lead anywhere, and are told by their log-probability
    return (block * size + offset)[:, 0].clamp(max=scores.shape[-1] - 1)


def _cut(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return scores with -inf for the tokens that top_k, top_p and min_p leave out."""
    if params.top_k is not None and params.top_k < scores.shape[-1]:
        smallest = scores.topk(params.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if params.top_p is not None and params.top_p < 1:
        ordered = scores.sort(-1, descending=True).values
        parts = (ordered.softmax(-1, dtype=torch.float64) * _WHOLE).long()
        # a token stays if those before it do not have the probability yet
        is_kept = parts.cumsum(-1) - parts < params.top_p * _WHOLE
        smallest = ordered.masked_fill(~is_kept, float("inf")).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if params.min_p:
        probabilities = scores.softmax(-1)
        limit = probabilities.amax(-1, keepdim=True) * params.min_p
        scores = scores.masked_fill(probabilities < limit, float("-inf"))
    return scores
