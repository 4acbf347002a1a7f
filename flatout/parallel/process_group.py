"""This rank's device, and the process group that joins all ranks of a run."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in the stubs

from flatout.environment import STORE_SOCKET, environment, master, whole_number
from flatout.errors import Fix, PeerLostError, ResourceError, first_line
from flatout.io.bounded_wait import POLL_S, BoundedWait
from flatout.io.gpu_driver import no_gpu_error
from flatout.parallel.rank import Rank
from flatout.parallel.shards import local_part, replicas_of

# PeerWatch finds lost and stuck ranks; this timeout must outlast whatever one rank does alone, such as a slow save
TIMEOUT = timedelta(hours=12)
JOIN_S = 900.0
CONNECT_S = 1.0
# a store that answers no question for so long is named as the one that is awaited
SILENT_S = 5.0
# runs of this process so far: the launcher's store outlives a run, and keeps its keys
_runs = itertools.count()


def choose_device(setting: str, rank: Rank) -> torch.device:
    """Return this rank's device for `auto`, `cpu` or `cuda`. Raises ResourceError if it needs a GPU and has none."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cpu" or (setting == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise no_gpu_error("device: cuda" if rank.world == 1 else f"rank {rank.index}")
    if rank.local_index >= num_gpus:
        raise ResourceError(
            f"rank {rank.index} needs GPU {rank.local_index}; {num_gpus} are visible", [Fix({"gpus": num_gpus})]
        )
    device = torch.device("cuda", rank.local_index)
    torch.cuda.set_device(device)
    return device


def join_group(
    rank: Rank,
    device: torch.device,
    *,
    join_s: float = JOIN_S,
    on_met: Callable[[Store], None] = lambda store: None,
) -> None:
    """Join the other ranks, if any, over NCCL (GPU) or gloo (CPU), unless this process has already joined.

    Rank 0 hosts the store, on the socket that its launcher opened or at MASTER_PORT. `on_met` gets the store once all
    ranks have joined it, in a thread of its own, before the first collective. Raises PeerLostError with the ranks that
    have not joined after `join_s`.
    """
    if rank.world == 1 or dist.is_initialized():
        return
    store = _Meeting(rank, join_s, on_met).hold()
    on_gpu = device.type == "cuda"
    # device_id binds the group to this rank's GPU; otherwise collectives have to guess it
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.world,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )


class _Meeting:
    """All ranks meet at rank 0's store, on a thread: the store waits in C without a limit while rank 0 stands still.

    The socket that a launcher opened for rank 0 connects others even before rank 0 runs, or when it is stopped.
    """

    def __init__(self, rank: Rank, join_s: float, on_met: Callable[[Store], None]) -> None:
        self._rank, self._join_s, self._on_met = rank, join_s, on_met
        self._host, self._port = master()
        # torch's launcher may host the store instead of rank 0
        self._is_host = rank.is_first and environment().get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # who is awaited and why, replaced as one value by the thread; until the store answers, it is rank 0
        self._awaited: tuple[tuple[int, ...], str] = (0,), "it does not answer; see its log"
        self._answered_at = time.monotonic()
        self._is_over = threading.Event()
        self._met: Future[Store] = Future()

    def hold(self) -> Store:
        """Return the store once all ranks have met."""
        wait = BoundedWait(self._join_s, "faults.join_s", error=lambda text: PeerLostError(text, self._awaited[0][0]))
        # ended with the process if it is still held in C
        thread = threading.Thread(target=self._run, name="flatout-join", daemon=True)
        thread.start()
        try:
            while not futures.wait([self._met], POLL_S).done:
                if time.monotonic() - self._answered_at > SILENT_S and not self._is_host:
                    self._awaited = (0,), "it has stopped answering; see its log"
                ranks, reason = self._awaited
                named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._rank.world}"
                wait.check(f"{named} at {self._host}:{self._port}" if ranks == (0,) else named, reason)
        finally:
            # a thread that comes back from C while Python shuts down would abort the process
            self._is_over.set()
            thread.join(CONNECT_S)
        try:
            return self._met.result()
        except dist.DistError as error:
            why = first_line(error)
            if self._is_host and "EADDRINUSE" in why:
                raise ResourceError(
                    f"MASTER_PORT is {self._port}, where another process of this node listens; choose a free port"
                ) from error
            lost = f"rank {self._rank.index} lost rank 0 before all ranks joined ({why}); see its log"
            raise PeerLostError(lost, 0) from error

    def _run(self) -> None:
        try:
            self._connect()
            if self._is_over.is_set():
                return
            store = self._open_store()
            store.set(f"met/{self._rank.index}", socket.gethostname())
            others = range(self._rank.world)
            while missing := tuple(other for other in others if not store.check([f"met/{other}"])):
                self._answered_at = time.monotonic()
                self._awaited = missing, "see its log; it may still read its data, be stopped, or have exited"
                if self._is_over.wait(POLL_S):
                    return
            self._awaited = (0,), "all ranks have joined, but its heartbeats do not answer"
            self._on_met(store)
            self._met.set_result(store)
        except BaseException as error:  # noqa: BLE001  (raised in the thread that waits)
            self._met.set_exception(error)

    def _connect(self) -> None:
        """Wait until something listens: TCPStore would retry without an explanation."""
        while not self._is_host and not self._is_over.is_set():
            self._answered_at = time.monotonic()
            try:
                socket.create_connection((self._host, self._port), timeout=CONNECT_S).close()
                return
            except OSError as error:
                reason = f"{error}; check MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
                self._awaited = (0,), reason
                time.sleep(POLL_S)

    def _open_store(self) -> Store:
        env = environment()
        # the listening socket that rank 0 inherited; without it, the store opens its own on the master port
        fd = whole_number(env, STORE_SOCKET) if STORE_SOCKET in env else None
        server = TCPStore(
            self._host,
            self._port,
            is_master=self._is_host,
            timeout=TIMEOUT,  # `hold` ends the wait
            wait_for_workers=False,
            master_listen_fd=fd if self._is_host else None,
        )
        return PrefixStore(f"{env.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_runs)}", server)


def share_weights(model: nn.Module) -> None:
    """Broadcast the first rank's parameters and buffers to all ranks; tensors on the meta device are skipped.

    Slices of experts are broadcast to the ranks that hold the same ones.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            # gloo does not support float8
            data = local_part(tensor)
            data = data.view(torch.uint8) if data.itemsize == 1 else data
            dist.broadcast(data, group_src=0, group=replicas_of(tensor))


def leave_group() -> None:
    """Destroy the process group if it is still initialized."""
    if dist.is_initialized():
        dist.destroy_process_group()
