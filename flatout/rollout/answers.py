"""The answers of one call while they are sampled: who is where, what was drawn, and when each ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatout.rollout.sampler import Completion, Ending, SamplingParams
from flatout.rollout.sampling import choose, draw_key


@dataclass(slots=True)
class PendingCompletion:
    """An answer on the host. `num_drawn` counts tokens that the device has drawn, read or not."""

    prompt: int
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
        self._params, self._broadcast_tokens, self.last_position = params, broadcast_tokens, length - 1
        integers = [torch.zeros(num_places, dtype=torch.int64, device=device) for _ in range(4)]
        self.tokens, self.positions, self._counts, self._keys = integers
        self.logprobs = torch.zeros(num_places, dtype=torch.float64, device=device)
        # made with the first logits, which say how many tokens there are
        self._seen: Tensor | None = None

    def begin(self, answers: Sequence[PendingCompletion], first: int, logits: Tensor) -> None:
        """Draw the first token of answers at places from `first` on; logits (answers, V)."""
        device, places = logits.device, slice(first, first + len(answers))
        keys = [draw_key(self._params.seed, answer.prompt, answer.completion) for answer in answers]
        self._keys[places] = torch.tensor(keys, device=device)
        self._counts[places] = 0
        self.positions[places] = torch.tensor([len(answer.prompt_ids) for answer in answers], device=device)
        if self._params.repetition_penalty != 1:
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
        chosen, logprobs = choose(logits, self._params, self._keys[places], self._counts[places], seen)
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
