"""A thread in every rank that detects a lost peer within seconds, and notifies all ranks before any of them exits."""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in the stubs

from flatout.config.parallel import FaultsConfig
from flatout.environment import PARENT, SECRET, STATUS_BOARD, environment, master, whole_number
from flatout.errors import FlatoutError, PeerLostError, PreemptedError, is_of_a_collective
from flatout.io import bounded_wait
from flatout.io.bounded_wait import BoundedWait
from flatout.io.peer_sockets import PeerListener, listen
from flatout.io.status_board import StatusBoard
from flatout.parallel.control_group import ControlGroup
from flatout.parallel.fault_tolerance.heartbeat import Heartbeats, PeerFailure, RankStatus
from flatout.parallel.process_group import join_group
from flatout.parallel.rank import Rank

# time for a rank to exit by itself after a loss is detected; if it is stuck in a collective, it is then ended
LEAVE_S = 2.0
# share of `hang_s` after which a rank whose Python is stuck writes its stacks to stderr
STACKS_SHARE = 0.6
# phases in which one rank may work for long while the others wait
LONG_PHASES = frozenset({"start", "sample", "evaluate", "save", "finish"})
# waiting for a step is reported once it takes this many times as long as the last one
USUAL_STEPS = 3.0

OnEvent = Callable[[str, Mapping[str, Any]], None]
OnPeerLost = Callable[[PeerLostError], None]


def leave(error: PeerLostError) -> NoReturn:
    """End this process without waiting for a collective; for at most LEAVE_S, write its stacks to stderr."""

    def write_stacks() -> None:
        sys.stderr.write(f"error: {error}\n")
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        sys.stdout.flush()

    try:
        # in a thread, as a terminal or a full pipe may block
        writer = threading.Thread(target=write_stacks, daemon=True)
        writer.start()
        writer.join(LEAVE_S)
    finally:
        os._exit(error.exit_code)


class PeerWatch:
    """Keeps this rank's status (`set_phase`) and, after `join`, detects when another rank stops responding.

    With one rank there is nothing to watch. On the first rank, `on_event` gets the events of all ranks; it must neither
    block nor raise, as the watch's thread calls it between heartbeats. Each of `on_peer_lost` is called as soon as a
    rank is lost, in a thread of its own; LEAVE_S later `leave` ends this process if it has not exited by itself.
    `on_phase` gets this rank's phases and completed steps.
    """

    def __init__(
        self,
        faults: FaultsConfig,
        on_event: OnEvent,
        on_peer_lost: Sequence[OnPeerLost] = (),
        *,
        on_phase: Callable[[str, int], None] = lambda phase, step: None,
        leave: Callable[[PeerLostError], NoReturn] = leave,
    ) -> None:
        self._faults, self._on_event, self._on_peer_lost, self._leave = faults, on_event, on_peer_lost, leave
        self._on_phase = on_phase
        self._status = RankStatus()
        self._changed_at = time.monotonic()
        self._step_s, self._step_began_at = 0.0, self._changed_at
        self._rank = Rank()
        self._board: StatusBoard | None = None
        if STATUS_BOARD in environment():
            # another process may have inherited the variable, but not the file
            with suppress(OSError, ValueError):
                self._board = StatusBoard(whole_number(environment(), STATUS_BOARD))
        self._heartbeats: Heartbeats | None = None
        self._group: ControlGroup | None = None
        self._lost_error: PeerLostError | None = None
        self._own_failure: tuple[str, int] | None = None
        self._lost, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._last_notice: tuple[int, str] | None = None

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Set what this rank does now, after `step` completed steps; in phase `sum` it waits for the other ranks."""
        now_s, status = time.monotonic(), self._status
        if phase == "step":
            self._step_s, self._step_began_at = now_s - self._step_began_at, now_s
        self._status = RankStatus(status.step if step is None else step, phase, phase == "sum", status.num_changes + 1)
        self._changed_at = now_s
        if self._board is not None:
            self._board.write(self._rank.local_index, self._status.step, phase)
        if phase != "sum":
            self._on_phase(phase, self._status.step)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for the other ranks; has no effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._status = replace(self._status, waits=True)
        try:
            yield
        finally:
            self._status = replace(self._status, waits=False)
            self.alive()

    def alive(self) -> None:
        """Say that the phase of this rank goes on, which may take longer than a phase without a sign of life."""
        self._status = replace(self._status, num_changes=self._status.num_changes + 1)
        self._changed_at = time.monotonic()

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Report an event of this rank on the first rank."""
        (self._on_event if self._heartbeats is None or self._rank.is_first else self._heartbeats.event)(kind, facts)

    def join(self, rank: Rank, device: torch.device) -> ControlGroup:
        """Join the other ranks and start watching them; all ranks call this together, and may call it repeatedly."""
        if self._group is None:
            join_group(rank, device, join_s=self._faults.join_s, on_met=lambda store: self.start(rank, store))
            self._group = ControlGroup(rank, self.waiting)
        return self._group

    def start(self, rank: Rank, store: Store) -> None:
        """Start watching the other ranks, found through the store; all ranks call this right after joining."""
        self._rank = rank
        if self._board is not None:
            self._board.write(rank.local_index, self._status.step, self._status.phase)
        # leave part of hang_s for detecting and reporting the loss
        hang_s, interval_s = self._faults.hang_s * 0.8, min(0.5, self._faults.hang_s / 10)
        host, secret = master()[0], environment().get(SECRET)
        make = partial(Heartbeats, rank.index, rank.world, hang_s, every_s=interval_s, on_event=self._on_event)
        if rank.is_first:
            try:
                socket_here = listen(host)  # this node's address only, so that other networks cannot reach it
            except OSError:
                socket_here = listen("")  # the host name is a service's, which no interface of this node has
            if secret is None:
                store.set("heartbeat/secret", secret := secrets.token_hex(32))
            store.set("heartbeat/port", str(socket_here.getsockname()[1]))

            def report(address: str, why: str) -> None:
                self._on_event("rejected_connection", {"address": address, "why": why})

            self._heartbeats = make(listener=PeerListener(socket_here, secret, report))
        else:
            address = host, int(store.get("heartbeat/port"))
            self._heartbeats = make().connect(address, secret or store.get("heartbeat/secret").decode())
        self._thread = threading.Thread(None, self._watch, "watch", (self._heartbeats, interval_s), daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Wrap work with other ranks: an error caused by a lost rank becomes a PeerLostError for that rank.

        Any other error of this rank is reported to the other ranks.
        """
        try:
            yield
            self.close()
        except PreemptedError:
            self.close()
            raise
        except BaseException as error:
            is_collective = is_of_a_collective(error)
            if is_collective and self._thread is not None:
                # the thread soon finds out which rank is lost
                wait = BoundedWait(self._faults.hang_s + LEAVE_S, "faults.hang_s")
                with suppress(PeerLostError):
                    while not self._lost.wait(0.1):
                        wait.check("the name of the lost rank after a collective failed")
            if self._lost_error is not None and isinstance(error, Exception):
                if is_collective:
                    raise self._lost_error from error
            else:
                vars(error).update(step=self._status.step, phase=self._status.phase)
                lines = str(error).splitlines() or [""]
                code = error.exit_code if isinstance(error, FlatoutError) else PeerLostError.exit_code
                self._own_failure = f"{type(error).__name__}: {lines[0][:300]}", code
                self.close()
            raise

    def close(self) -> None:
        """Stop watching; unless this rank failed or lost a peer, the others are notified of its normal exit."""
        if self._thread is None:
            return
        self._closing.set()
        if self._lost_error is None:
            self._thread.join(timeout=LEAVE_S)

    def _watch(self, heartbeats: Heartbeats, interval_s: float) -> None:
        launcher, is_ours = os.getppid(), PARENT in environment()
        failure: PeerFailure | None = None
        while failure is None and not self._closing.is_set():
            # unless it is armed again in time, a C thread writes the stacks, even while a library call holds the GIL;
            # stderr may be closed, or not a file
            with suppress(OSError, ValueError, AttributeError):
                faulthandler.dump_traceback_later(self._faults.hang_s * STACKS_SHARE)
            failure = heartbeats.poll(interval_s, self._status)
            if failure is None and self._rank.is_first:
                failure = self._check_progress(heartbeats)
            if os.getppid() != launcher and not is_ours:
                # the launcher is gone: save and stop; under flatout's own launcher the kernel sends SIGTERM
                launcher = os.getppid()
                os.kill(os.getpid(), signal.SIGTERM)
        faulthandler.cancel_dump_traceback_later()
        if self._own_failure is not None:
            # this rank's own error has precedence, even if another rank failed at the same time
            heartbeats.fail(*self._own_failure, self._status)
            return
        if failure is None:
            heartbeats.close()
            return
        failure = self._exact(failure)
        if self._rank.is_first:
            heartbeats.broadcast(failure)
        rank, step = failure.rank, failure.status.step
        facts = {"rank": rank, "host": failure.host, "step": step + 1, "phase": failure.status.phase}
        self._on_event("peer_lost", {**facts, "how": failure.how})
        self._lost_error = error = PeerLostError(str(failure), rank, step=step, exit_code=failure.exit_code)
        self._lost.set()
        with suppress(RuntimeError):  # no thread can start
            for call in self._on_peer_lost:
                # without delay, as NCCL or gloo may abort this process at any moment; in threads, as a disk may stall
                threading.Thread(target=call, args=(error,), daemon=True).start()
        # the main thread exits by itself if it can; if it is stuck in a collective, it never would
        time.sleep(LEAVE_S)
        self._leave(error)

    def _exact(self, failure: PeerFailure) -> PeerFailure:
        """Return the failure with the status that its rank left on this node's board, which no heartbeat delays."""
        slot = failure.rank - (self._rank.index - self._rank.local_index)
        if failure.is_reported or self._board is None or not 0 <= slot < self._rank.local_world:
            return failure
        if (exact := self._board.read(slot)) is None:
            return failure
        step, phase = exact
        return replace(failure, status=replace(failure.status, step=step, phase=phase), is_exact=True)

    def _check_progress(self, heartbeats: Heartbeats) -> PeerFailure | None:
        """Return a failure for the rank furthest behind once no rank has moved for long; report long waits before."""
        ranks = {
            rank: (one.status, one.changed_at, one.host) for rank, one in heartbeats.peers.items() if not one.has_left
        }
        ranks[0] = self._status, self._changed_at, socket.gethostname()
        statuses = [status for status, _, _ in ranks.values()]
        setting = "long_phase_s" if any(status.phase in LONG_PHASES for status in statuses) else "stall_s"
        limit_s = getattr(self._faults, setting)
        rank = min(ranks, key=lambda rank: (ranks[rank][0].waits, ranks[rank][0].step, rank))
        status, changed_at, host = ranks[rank]
        now_s = time.monotonic()
        still_s = now_s - max(changed_at for _, changed_at, _ in ranks.values())
        if still_s >= limit_s:
            # heartbeats went on all the time
            how = f"has made no progress for {still_s:.0f} s (faults.{setting})"
            return PeerFailure(rank, host, status, how, is_exact=True)
        is_awaited = not status.waits and any(other.waits for other in statuses)
        is_late = now_s - changed_at >= max(bounded_wait.NOTICE_AFTER_S, USUAL_STEPS * self._step_s)
        if is_awaited and is_late and (status.step, status.phase) != self._last_notice:
            self._last_notice = status.step, status.phase
            facts = {"for": f"rank {rank} on {host}", "phase": status.phase, "step": status.step + 1}
            self._on_event("waiting", {**facts, "at_most_s": limit_s, "setting": f"faults.{setting}"})
        return None
