"""This rank's device, and the process group that joins all ranks of a run."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in the stubs

from flatout.environment import STORE_SOCKET, environment, master, whole_number
from flatout.errors import PeerLostError, ResourceError, first_line
from flatout.io.bounded_wait import BoundedWait
from flatout.parallel.rank import Rank
from flatout.parallel.shards import local_part, replicas_of

# PeerWatch finds lost and stuck ranks; this timeout must outlast whatever one rank does alone, such as a slow save
TIMEOUT = timedelta(hours=12)
JOIN_S = 900.0
CONNECT_S = 1.0
# runs of this process so far: the launcher's store outlives a run, and keeps its keys
_runs = itertools.count()


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """Return this rank's device for `auto`, `cpu` or `cuda`. Raises ResourceError if it needs a GPU and has none."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if rank.local_index >= num_gpus:
        raise ResourceError(
            f"rank {rank.index} needs GPU {rank.local_index}, but {num_gpus} are visible; start fewer processes"
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
    ranks have joined it, before the first wait in C code, which Python cannot interrupt. Raises PeerLostError when a
    rank has not joined after `join_s`.
    """
    if rank.world == 1 or dist.is_initialized():
        return
    wait = BoundedWait(join_s, "faults.join_s")
    host, port = master()
    env = environment()
    # the listening socket that rank 0 inherited; without it, the store opens its own on the master port
    fd = whole_number(env, STORE_SOCKET) if STORE_SOCKET in env else None
    # torch's launcher may host the store instead of rank 0
    is_host = rank.is_first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not is_host:
        try:
            # connect before TCPStore does, which waits without an explanation and ignores Ctrl-C
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            break
        except OSError as error:
            reason = f"{error}; check MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
            wait.pause(f"rank 0 at {host}:{port}", reason)
    timeout, own_fd = timedelta(seconds=max(1.0, wait.left_s)), fd if is_host else None
    try:
        server = TCPStore(
            host, port, is_master=is_host, timeout=timeout, wait_for_workers=False, master_listen_fd=own_fd
        )
        store = PrefixStore(f"{env.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_runs)}", server)
        store.set(f"met/{rank.index}", socket.gethostname())
        for other in range(rank.world):
            while not store.check([f"met/{other}"]):
                wait.pause(f"rank {other} of {rank.world}", "see its log; it may still read its data, or have exited")
        on_met(store)
    except dist.DistError as error:
        why = first_line(error)
        raise PeerLostError(f"rank {rank.index} lost rank 0 before all ranks joined ({why}); see its log") from error
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
