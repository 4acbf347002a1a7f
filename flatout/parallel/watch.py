"""A thread in every rank that knows within seconds when another is lost, and tells all before anyone leaves."""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch

from flatout.config.faults import FaultsConfig
from flatout.errors import PeerLostError, PreemptedError
from flatout.parallel.heartbeat import Hub, Loss, Mark, Spoke
from flatout.parallel.messages import Messages
from flatout.parallel.rank import master_address

# what a rank needs to leave by itself once it knows; one that waits on a collective is then ended
LEAVE_S = 2.0
# the share of `hang_s` after which a rank whose Python stands still writes its stacks to stderr
STACKS_SHARE = 0.6
# phases in which one rank may work long while the others wait for it
LONG_PHASES = frozenset({"start", "evaluate", "save", "finish"})

Tell = Callable[[str, Mapping[str, Any]], None]
OnLoss = Callable[[PeerLostError], None]


def leave(error: PeerLostError) -> NoReturn:
    """End this process at once, without waiting for a collective; its stacks go to stderr."""
    sys.stderr.write(f"error: {error}\n")
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(error.exit_code)


class Watch:
    """Knows where this rank is (`at`), and, once `start`ed, whether all others still answer.

    With one rank it does nothing. `on_loss` is called as soon as one is lost, `leave` ends a rank that cannot raise.
    """

    def __init__(
        self,
        faults: FaultsConfig,
        tell: Tell,
        on_loss: OnLoss | None = None,
        *,
        leave: Callable[[PeerLostError], NoReturn] = leave,
    ) -> None:
        self._faults, self._tell, self._on_loss, self._leave = faults, tell, on_loss, leave
        self._mark = Mark()
        self._moved_at = time.monotonic()
        self._side: Hub | Spoke | None = None
        self._rank = 0
        self._loss: Loss | None = None
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def at(self, phase: str, step: int | None = None) -> None:
        """This rank is in that phase now, of the step after `step` completed ones."""
        self._mark = Mark(self._mark.step if step is None else step, phase)
        self._moved_at = time.monotonic()

    def start(self, messages: Messages) -> None:
        """Join the other ranks' watches; all ranks call this together, as soon as they have met."""
        rank = messages.rank
        if rank.world == 1:
            return
        self._rank = rank.index
        # how long without a word is too long, less what finding and telling it take
        hang_s = self._faults.hang_s * 0.8
        listener, contact = None, [0, 0]
        if rank.is_first:
            listener = _listen(master_address(), rank.world)
            contact = [listener.getsockname()[1], secrets.randbits(48)]
        port, token = messages.exchange(contact)[0]
        if listener is not None:
            self._side = Hub(listener, token=token, world=rank.world, hang_s=hang_s)
        else:
            self._side = Spoke((master_address(), port), token=token, rank=rank.index, hang_s=hang_s)
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around work with other ranks: an error that comes of a lost rank becomes a PeerLostError that names it.

        Any other error of this rank is told to the others.
        """
        try:
            yield
            self.close()
        except PreemptedError:
            self.close()
            raise
        except (RuntimeError, PeerLostError) as error:
            # collectives tell a lost peer as a plain RuntimeError, before the watch may know which rank it was
            if self._thread is not None and self._lost.wait(self._patience_s(error)):
                raise self._error() from error
            self._fail(error)
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Stop watching; the others know that this rank left in good order, unless it failed or lost one."""
        if self._thread is None:
            return
        self._closing.set()
        if self._loss is None:
            self._thread.join(timeout=LEAVE_S)

    def _patience_s(self, error: RuntimeError | PeerLostError) -> float:
        """How long the watch may need to learn why this happened."""
        text = str(error).lower()
        is_told = isinstance(error, (torch.distributed.DistError, PeerLostError))
        is_collective = is_told or "gloo" in text or "connection" in text
        return self._faults.hang_s + LEAVE_S if is_collective else 0.5

    def _fail(self, error: BaseException) -> None:
        if self._thread is None or self._loss is not None:
            return
        lines = str(error).splitlines() or [""]
        self._failure = f"{type(error).__name__}: {lines[0][:300]}"
        self._closing.set()
        self._thread.join(timeout=LEAVE_S)

    def _error(self) -> PeerLostError:
        assert self._loss is not None
        return PeerLostError(str(self._loss), self._loss.rank)

    def _watch(self) -> None:
        interval_s = min(0.5, self._faults.hang_s / 10)
        launcher = os.getppid()
        loss: Loss | None = None
        while loss is None and not self._closing.is_set():
            show_stacks_after(self._faults.hang_s * STACKS_SHARE)
            loss = self._beat(interval_s)
            if loss is None and os.getppid() != launcher:
                loss = Loss(self._rank, socket.gethostname(), self._mark, "has lost its launcher")
        faulthandler.cancel_dump_traceback_later()
        if loss is not None:
            self._lose(loss)
            return
        side = self._side
        if isinstance(side, Spoke):
            side.fail(self._failure) if self._failure else side.close()
        elif isinstance(side, Hub):
            if self._failure:
                side.tell(Loss(0, socket.gethostname(), self._mark, f"failed ({self._failure})"))
            else:
                side.close()

    def _beat(self, wait_s: float) -> Loss | None:
        if isinstance(self._side, Spoke):
            self._side.wait(wait_s)
            return self._side.beat(self._mark, wait_s)
        assert isinstance(self._side, Hub)
        loss = self._side.beat(wait_s, self._mark)
        marks = {rank: peer.mark for rank, peer in self._side.peers.items() if not peer.has_left}
        marks[0] = self._mark
        return loss or self._stalled(marks)

    def _stalled(self, marks: Mapping[int, Mark]) -> Loss | None:
        """The rank furthest behind, once nobody has moved for long."""
        still_s = time.monotonic() - self._moved_at
        if still_s < self._faults.stall_s or any(mark.phase in LONG_PHASES for mark in marks.values()):
            return None
        assert isinstance(self._side, Hub)
        rank = min(marks, key=lambda rank: (marks[rank].step, marks[rank].phase == "sum", rank))
        host = self._side.peers[rank].host if rank else socket.gethostname()
        return Loss(rank, host, marks[rank], f"has not moved for {still_s:.0f} s")

    def _lose(self, loss: Loss) -> None:
        if isinstance(self._side, Hub):
            self._side.tell(loss)
        self._loss = loss
        self._lost.set()
        facts = {"rank": loss.rank, "host": loss.host, "step": loss.mark.step + 1, "phase": loss.mark.phase}
        with suppress(OSError, ValueError):
            if self._on_loss is not None:
                # at once: the library of collectives may abort this process any moment
                self._on_loss(self._error())
            self._tell("peer_lost", {**facts, "how": loss.how})
        # the main thread leaves by itself where it can; one that waits on a collective never would
        time.sleep(LEAVE_S)
        self._leave(self._error())


def show_stacks_after(wait_s: float) -> None:
    """Write this process's stacks to stderr unless this is called again within so long.

    It needs no Python thread: one that holds the interpreter in a call of a library cannot speak for itself, and the
    others only know that this rank is silent.
    """
    # stderr may be closed, or no file
    with suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback_later(wait_s)


def _listen(address: str, world: int) -> socket.socket:
    """A listener on rank 0's own address, so that only its network reaches it; on all where the name is a service's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=world)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=world)
