"""From planned sample ids to batches on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from flatout.data.store import TokenStore
from flatout.models.packed import PackedBatch, kernel_borders, pack
from flatout.plan.types import MicroBatch


class Feed:
    """Reads samples from the memory-mapped store and flattens them; `wait_s` adds up how long training waited."""

    def __init__(self, store: TokenStore, device: torch.device, *, max_documents: int) -> None:
        """`max_documents` is the most samples that a micro-batch holds."""
        self._store = store
        self._device = device
        # one number of borders for the whole run, or compiled graphs would be made again
        self.num_borders = kernel_borders(max_documents) if device.type == "cuda" else None
        self.wait_s = 0.0

    def origin(self, sample_id: int) -> str:
        """The file and row that a sample came from."""
        return str(self._store.origin(sample_id))

    def batches(self, micro_batches: Sequence[MicroBatch]) -> Iterator[PackedBatch]:
        """One batch on the device for each micro-batch, in order."""
        for micro_batch in micro_batches:
            started = time.perf_counter()
            samples = [self._store.sample(sample_id) for sample_id in micro_batch.sample_ids]
            batch = pack(samples, num_borders=self.num_borders).to(self._device)
            self.wait_s += time.perf_counter() - started
            yield batch
