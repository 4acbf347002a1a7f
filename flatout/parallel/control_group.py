"""Exchange small JSON values between ranks over a separate CPU group, so that slow disks cannot time out GPU work."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatout import errors
from flatout.parallel.rank import Rank

# a rank may wait here for another one's disk: 2 TB at 100 MB/s take 6 hours; a dead rank is noticed immediately
PATIENCE = timedelta(hours=6)


class ControlGroup:
    """A group of all ranks; all methods are collective, called in the same order and from one thread at a time.

    With one rank they return the local result. `waiting` is entered around each wait for the other ranks.
    """

    def __init__(
        self,
        rank: Rank = Rank(),  # noqa: B008  (Rank is frozen)
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.rank, self._waiting = rank, waiting
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if rank.world > 1 else None

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank. Raises PeerLostError when a rank is gone."""
        if self._group is None:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            sizes = self._gather(torch.tensor([content.numel()]))
            padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
            padded[: content.numel()] = content
            parts = self._gather(padded)
        except RuntimeError as error:
            raise errors.PeerLostError(
                f"rank {self.rank.index}: lost another rank ({errors.first_line(error)}); restart the run"
            ) from error
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.rank.world)]
        with self._waiting():
            dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def run_on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; return the JSON results of all ranks, or raise on all ranks if it failed on one.

        The rank whose work failed raises its own error. The others raise an error of the same class (a FlatoutError)
        that gives the rank.
        """
        if self._group is None:
            return [work()]
        try:
            answer = {"value": work()}
        except Exception as error:
            # whatever the error, the others must not wait for this rank
            known = error if isinstance(error, errors.FlatoutError) else errors.FlatoutError(str(error))
            self.all_gather({"error": [known.kind, known.text, [asdict(fix) for fix in known.fixes]]})
            raise
        answers = self.all_gather(answer)
        for index, other in enumerate(answers):
            if "error" in other:
                kind, text, fixes = other["error"]
                raise errors.of_kind(kind, f"rank {index}: {text}", [errors.Fix(**fix) for fix in fixes])
        return [other["value"] for other in answers]

    def run_on_first_rank(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first rank only; all ranks return its result or raise its error."""
        return self.run_on_all_ranks(lambda: work() if self.rank.is_first else None)[0]
