"""Small JSON values between ranks, over a CPU group of its own, where waiting for a disk can time out no GPU work."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatout import errors
from flatout.parallel.rank import Rank

# a rank may wait here for another one's disk: 2 TB at 100 MB/s take 6 hours; a rank that died is noticed at once
PATIENCE = timedelta(hours=6)


class Messages:
    """All methods are collective: every rank calls them in the same order, from one thread at a time. Alone, they do
    nothing but answer."""

    def __init__(self, rank: Rank = Rank()) -> None:  # noqa: B008  (Rank is frozen)
        self.rank = rank
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if rank.world > 1 else None

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank. Raises PeerLostError when one of them is gone."""
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
                f"rank {self.rank.index}: another rank is gone ({str(error).splitlines()[0]}); start the run again"
            ) from error
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.rank.world)]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def agree(self, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank; all get every rank's result (JSON), or all raise when it failed on one.

        The rank whose work failed raises its own error, the others one of the same class (a FlatoutError) that names
        the rank.
        """
        if self._group is None:
            return [work()]
        try:
            answer = {"value": work()}
        except Exception as error:
            # whatever it is, the others must not wait for this rank
            self.exchange({"error": [type(error).__name__, str(error)]})
            raise
        answers = self.exchange(answer)
        for index, other in enumerate(answers):
            if "error" in other:
                name, text = other["error"]
                kind = getattr(errors, name, errors.FlatoutError)
                raise kind(f"rank {index}: {text}")
        return [other["value"] for other in answers]

    def first(self, work: Callable[[], Any]) -> Any:
        """Do `work` on the first rank only; all get its result, or all raise its error."""
        return self.agree(lambda: work() if self.rank.is_first else None)[0]
