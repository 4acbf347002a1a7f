"""A stop signal as a flag that is read between passes."""

from __future__ import annotations

import signal
from types import TracebackType

from flatout.errors import PreemptedError
from flatout.io.stop_signals import StopSignals


class StopRequest(StopSignals):
    """A stop signal as a flag: `with StopRequest() as stop: ... if stop.requested: save and leave`.

    The flag is read between micro-batches. A second signal raises KeyboardInterrupt immediately; a save in
    progress then leaves only temporary files, never a partial checkpoint.

    After a PreemptedError, further signals but Ctrl-C are ignored, unless Ctrl-C asked for the stop: the process is
    exiting, and its launcher may signal now (another rank was asked to stop first) or again (torch's does when another
    node leaves), which would turn "stopped and saved" into "killed".
    """

    def __init__(self, *, settle_s: float = 0.5) -> None:
        super().__init__(self._interrupt, settle_s=settle_s)

    @property
    def requested(self) -> bool:
        return self.number is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number != signal.SIGINT and isinstance(error, PreemptedError):
            # not SIG_IGN, which child processes would inherit
            self._found |= dict.fromkeys(self._found.keys() - {signal.SIGINT}, lambda number, frame: None)
        super().__exit__(kind, error, trace)

    def _interrupt(self) -> None:
        raise KeyboardInterrupt
