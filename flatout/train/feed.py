"""From planned sample ids to batches on the device, made ready ahead of time by one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice

import numpy as np
import torch

from flatout.data.store import TokenStore
from flatout.models.packed import PackedBatch, kernel_borders, pack
from flatout.plan.types import MicroBatch, StepPlan

# micro-batches made ready beyond the one in use, and the steps that they are looked for in
NUM_AHEAD = 2

Staged = tuple[PackedBatch, torch.cuda.Event | None]


class Feed:
    """Reads samples from the memory-mapped store, flattens them and copies them to the device, before they are needed.

    A thread reads, packs, pins and copies on a stream of its own; the training stream waits for that copy, the host
    does not. `wait_s` adds up the seconds the host was blocked for data; the device waits for data no longer than
    that. Which micro-batches were foreseen changes no value, only the waiting. Call `close` at the end.
    """

    def __init__(
        self, store: TokenStore, device: torch.device, *, max_documents: int, ladder: Sequence[int] = ()
    ) -> None:
        """`max_documents` is the most samples that a micro-batch holds; `ladder` as in `stream_size`."""
        self._store = store
        self._device = device
        # one number of borders for the whole run, or compiled graphs would be made again
        self.num_borders = kernel_borders(max_documents) if device.type == "cuda" else None
        self.wait_s = 0.0
        self.ladder = ladder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flatout-feed")
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staged: dict[MicroBatch, Future[Staged]] = {}
        self._following: Sequence[MicroBatch] = ()

    def origin(self, sample_id: int) -> str:
        """The file and row that a sample came from."""
        return str(self._store.origin(sample_id))

    def ahead(self, steps: Iterable[StepPlan], rank: int) -> Iterator[StepPlan]:
        """The same steps; while one is taken, this rank's first micro-batches of the next ones are made ready."""
        window: deque[StepPlan | None] = deque()
        for step in chain(steps, [None] * NUM_AHEAD):
            window.append(step)
            if len(window) > NUM_AHEAD and (now := window.popleft()) is not None:
                later = chain.from_iterable(other.ranks[rank] for other in window if other is not None)
                self._following = list(islice(later, NUM_AHEAD))
                yield now

    def batches(self, micro_batches: Sequence[MicroBatch]) -> Iterator[PackedBatch]:
        """One batch on the device for each micro-batch, in order; micro-batches nobody foresaw are made at once.

        What was made ready for micro-batches that are not next any more is dropped. Raises what reading raises.
        """
        for place, micro_batch in enumerate(micro_batches):
            started = time.perf_counter()
            future = self._staged.pop(micro_batch, None) or self._thread.submit(self._stage, micro_batch)
            later = chain(micro_batches[place + 1 :], self._following)
            self._stage_ahead(list(islice(later, NUM_AHEAD)))
            batch, copied = future.result()
            self.wait_s += time.perf_counter() - started
            if copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                batch.used_on(stream)
            yield batch

    def close(self) -> None:
        """End the thread; batches that are ready are dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._staged.clear()

    def _stage_ahead(self, expected: Sequence[MicroBatch]) -> None:
        for stale in self._staged.keys() - set(expected):
            self._staged.pop(stale).cancel()
        for micro_batch in expected:
            if micro_batch not in self._staged:
                self._staged[micro_batch] = self._thread.submit(self._stage, micro_batch)

    def _stage(self, micro_batch: MicroBatch) -> Staged:
        samples = [self._store.sample(sample_id) for sample_id in micro_batch.sample_ids]
        if micro_batch.is_filler:
            samples = [(ids, np.zeros(len(ids), bool)) for ids, _ in samples]
        batch = pack(samples, num_borders=self.num_borders, ladder=self.ladder)
        if self._copies is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._copies):
            batch = batch.to(self._device)
            return batch, self._copies.record_event()
