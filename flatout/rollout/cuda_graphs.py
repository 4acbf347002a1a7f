"""Record a decoding step as a CUDA graph, one for each number of answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from flatout.errors import first_line
from flatout.models.compile.cuda_graphs import recording

SMALLEST = 16
# one for all recordings of a process, as each stream keeps a workspace
_stream = cache(torch.cuda.Stream)


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
