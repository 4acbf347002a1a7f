"""Turn planned sample ids into batches on the device, prefetched by one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.data.token_store import TokenSample, TokenStore
from flatout.errors import DataError, Fix
from flatout.models.context.shard import ContextShard
from flatout.models.packed import (
    BatchColumns,
    PackedBatch,
    flatten_samples,
    padded_num_boundaries,
    rows_of_positions,
)
from flatout.models.scoring import last_position
from flatout.planner.steps.step_plan import MicroBatch, StepPlan
from flatout.trainer.picture_inputs import Made, PictureMaker

# how many micro-batches are prefetched, and how many steps ahead they may lie
NUM_PREFETCHED = 2
# whose pictures are made ahead of time: they stay in host memory, and take longer than tokens
_NUM_PICTURED = 6

Staged = tuple[PackedBatch, torch.cuda.Event | None]


class BatchLoader:
    """Reads samples from the memory-mapped token store, flattens them and copies them to the device ahead of time.

    A thread reads, packs, pins and copies on its own stream; the training stream waits for that copy, the host does
    not. `wait_s` adds up the seconds the host was blocked for data; the device waits for data no longer than that.
    Prefetching affects speed only, never results. Call `close` at the end.
    """

    def __init__(
        self,
        store: TokenStore,
        device: torch.device,
        shard: ContextShard | None = None,
        *,
        max_documents: int,
        size_buckets: Sequence[int] = (),
        max_prefixes: int = 0,
        columns: Sequence[str] | None = None,
    ) -> None:
        """`max_documents` is the most samples that a micro-batch holds, and `max_prefixes` the most prefixes.

        `size_buckets` are as in `packed_size`. With `shard`, batches are that shard of each micro-batch. `columns` are
        the store's columns that batches carry, with the samples and units that labels belong to; None: neither.
        """
        self.store, self._of_round = store, False
        self._device = device
        # one number of boundaries for the whole run, to avoid recompilation
        is_cuda = device.type == "cuda"
        count = padded_num_boundaries if shard is None else shard.num_boundaries
        self.num_boundaries = count(max_documents + max_prefixes) if is_cuda else None
        self.num_shared_boundaries = padded_num_boundaries(max_prefixes) if is_cuda and max_prefixes else None
        self.shard = shard
        # makes the pixels of a store with pictures; set before the first batch
        self.pictures: PictureMaker | None = None
        self.wait_s = 0.0
        self.size_buckets = size_buckets
        self._columns = columns
        self.padding_id: int | None = None
        """Set it to have each sample scored at its last token that is another."""
        self._token_columns = [name for name in columns or () if store.columns[name].per == "token"]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flatout-loader")
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staged: dict[MicroBatch, Future[Staged]] = {}
        self._pictured: dict[MicroBatch, Made] = {}
        self._following: Sequence[MicroBatch] = ()

    def prefetching(self, steps: Iterable[StepPlan], rank: int) -> Iterator[StepPlan]:
        """Yield the same steps; while one runs, prefetch this rank's first micro-batches of the next ones."""
        window: deque[StepPlan | None] = deque()
        for step in chain(steps, [None] * NUM_PREFETCHED):
            window.append(step)
            if len(window) > NUM_PREFETCHED and (now := window.popleft()) is not None:
                later = chain.from_iterable(other.by_rank[rank] for other in window if other is not None)
                self._following = list(islice(later, _NUM_PICTURED))
                yield now

    def batches(self, micro_batches: Sequence[MicroBatch]) -> Iterator[PackedBatch]:
        """Yield one batch on the device for each micro-batch, in order; those not prefetched are made on demand.

        Prefetched batches that are no longer next are dropped. Errors of the reading thread are raised here.
        """
        for index, micro_batch in enumerate(micro_batches):
            started = time.perf_counter()
            future = self._staged.pop(micro_batch, None) or self._submit(micro_batch)
            self._prefetch(list(islice(chain(micro_batches[index + 1 :], self._following), _NUM_PICTURED)))
            try:
                batch, copied = future.result()
            except DataError as error:
                if self._of_round:  # nobody builds it
                    error.fixes = (Fix({}, "start the run again, which checks the answers of the round"),)
                raise
            self.wait_s += time.perf_counter() - started
            if copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                batch.used_on(stream)
            yield batch

    def read_from(self, store: TokenStore) -> None:
        """Read the answers of a round from now on, with the same columns; what was prefetched is dropped."""
        for future in self._staged.values():
            future.cancel()
        self._staged.clear()
        self.store, self._following, self._of_round = store, (), True

    def close(self) -> None:
        """Stop the thread and drop prefetched batches."""
        self._thread.shutdown(cancel_futures=True)
        if self.pictures is not None:
            self.pictures.close()
        self._staged.clear()

    def _prefetch(self, later: Sequence[MicroBatch]) -> None:
        expected = later[:NUM_PREFETCHED]
        if self.pictures is not None:
            for stale in self._pictured.keys() - set(later):
                self._pictured.pop(stale).cancel()
            for micro_batch in later:
                if not (micro_batch in self._pictured or micro_batch in self._staged or micro_batch.is_filler):
                    self._pictured[micro_batch] = self.pictures.begin(self.store, micro_batch.sample_ids)
        for stale in self._staged.keys() - set(expected):
            self._staged.pop(stale).cancel()
        for micro_batch in expected:
            if micro_batch not in self._staged:
                self._staged[micro_batch] = self._submit(micro_batch)

    def _submit(self, micro_batch: MicroBatch) -> Future[Staged]:
        return self._thread.submit(self._stage, micro_batch, self._pictured.pop(micro_batch, None))

    def _stage(self, micro_batch: MicroBatch, made: Made | None) -> Staged:
        read = [self.store.sample(sample_id, self._token_columns) for sample_id in micro_batch.sample_ids]
        samples = [sample.pair for sample in read]
        if micro_batch.is_filler:
            samples = [(ids, np.zeros(len(ids), bool)) for ids, _ in samples]
        batch = flatten_samples(
            samples,
            num_boundaries=self.num_boundaries if self.shard is None else None,
            size_buckets=self.size_buckets,
            row_length=micro_batch.row_length,
            fill_tokens=micro_batch.fill_tokens,
            shared=micro_batch.shared,
            num_shared_boundaries=self.num_shared_boundaries,
        )
        if micro_batch.is_filler:
            # routers count each token once
            batch.sample_counts[:] = 0
        if batch.num_label_tokens != micro_batch.num_label_tokens:
            # the loss is divided by the plan's count, so a different mask would rescale every gradient
            raise DataError(
                f"{self.store.folder}: samples {list(micro_batch.sample_ids)[:8]} have {batch.num_label_tokens:,} "
                f"label tokens, but the plan counts {micro_batch.num_label_tokens:,}",
                [Fix({}, "rebuild the data set")],
            )
        if self.pictures is not None:
            shown = () if micro_batch.is_filler else micro_batch.sample_ids
            batch = self.pictures.add(batch, self.store, shown, [ids for ids, _ in samples[: len(shown)]], made)
        if self._columns is not None:
            batch = replace(batch, loss_columns=self._gather(micro_batch, read, batch))
        if self.shard is not None:
            batch = self.shard.of(batch, self.num_boundaries)
        if self._copies is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._copies):
            batch = batch.to(self._device)
            return batch, self._copies.record_event()

    def _gather(self, micro_batch: MicroBatch, read: Sequence[TokenSample], batch: PackedBatch) -> BatchColumns:
        """Return the samples and units of a micro-batch and the columns that are needed; none of a filler's."""
        if micro_batch.is_filler:  # its samples are counted in another micro-batch
            read = []
        ids = np.array(micro_batch.sample_ids[: len(read)], np.int64)
        units, sample_units = np.unique(self.store.units_of(ids), return_inverse=True)
        counts = [int(np.count_nonzero(sample.loss_mask[1:])) for sample in read]
        per: dict[str, dict[str, torch.Tensor]] = {"token": {}, "sample": {}, "unit": {}}
        for name in self._columns or ():
            column, values = self.store.columns[name], self.store.extra[name]
            if column.per == "token":
                label_values = [sample.columns[name][1:][sample.loss_mask[1:]] for sample in read]
                gathered: NDArray[Any] = np.concatenate([np.zeros(0, column.stored), *label_values])
            else:
                gathered = np.array(values[ids if column.per == "sample" else units])
            per[column.per][name] = torch.from_numpy(gathered)
        label_samples = torch.from_numpy(np.repeat(np.arange(len(read)), counts))
        of_samples = torch.from_numpy(sample_units.astype(np.int64))
        scored = read if self.padding_id is not None else []
        last = [last_position(sample.token_ids, self.padding_id) for sample in scored]
        last_rows = torch.from_numpy(rows_of_positions(batch, last, micro_batch.shared))
        return BatchColumns(label_samples, of_samples, len(units), last_rows, per["token"], per["sample"], per["unit"])
