"""The rows of `flatout verify` that need several processes: started in one group of their own, told by JSON files.

    python -m flatout.train.verify_ranks FOLDER INDEX

runs one of them; the folder holds the job and takes the rows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatout.config.read import make_config
from flatout.errors import FlatoutError, PeerLostError, ResourceError, UsageError
from flatout.parallel.connect import choose_device
from flatout.parallel.group import leave_group
from flatout.parallel.rank import Rank
from flatout.train.storage import Storage, read_json
from flatout.train.verify_compare import Reference, Row
from flatout.train.verify_measure import measure, plan_quietly, set_up_quietly

# a rank waits so long for the others of its group
WAIT = timedelta(minutes=10)
JOB = "job.json"


@dataclass(frozen=True, slots=True)
class RankCase:
    """One row over several ranks: step `step_index` of `config` on `num_ranks` ranks beside a reference's folder."""

    name: str
    num_ranks: int
    config: dict[str, Any]
    step_index: int
    reference: str
    limit: float


def run_rank_cases(cases: Sequence[RankCase], folder: Path) -> list[Row]:
    """Run every case in one set of processes, started in a session of their own that never outlives this call.

    Cases that a lost process left undone fail with its last line. Raises ResourceError when that process lacked a GPU
    or memory.
    """
    num_processes = max(case.num_ranks for case in cases)
    folder.mkdir()
    Storage().write_json(folder / JOB, {"cases": [asdict(case) for case in cases]})
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(num_processes):
            with (folder / f"rank-{index}.log").open("wb") as log:
                command = [sys.executable, "-m", "flatout.train.verify_ranks", str(folder), str(index)]
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        lost = _wait(processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    why = _last_words(folder / f"rank-{lost}.log") if lost is not None else ""
    if lost is not None and processes[lost].returncode == ResourceError.exit_code:
        raise ResourceError(f"verify, rank {lost}: {why}")
    return [_row(folder, place, case, f"rank {lost} ended: {why}") for place, case in enumerate(cases)]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all to end well (None) or for the first that did not (its index)."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            # one that only lost another is not the one to tell of
            return min(failed, key=lambda index: codes[index] == PeerLostError.exit_code)
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)


def _last_words(log: Path) -> str:
    """The last error that a process told, or its last line; stacks may follow an error."""
    lines = log.read_text(errors="replace").strip().splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines or ["no output"])[-1]


def _row(folder: Path, place: int, case: RankCase, why_missing: str) -> Row:
    path = folder / f"row-{place}.json"
    if not path.exists():
        return Row(case.name, num_ranks=case.num_ranks, limit=case.limit, note=why_missing)
    return Row(**read_json(path))


def run_process(folder: Path, index: int) -> None:
    """What one of the processes does: its part of every case that has so many ranks. Raises a FlatoutError."""
    torch.set_num_threads(1)
    cases = [RankCase(**values) for values in read_json(folder / JOB)["cases"]]
    for place, case in enumerate(cases):
        if index >= case.num_ranks:
            continue
        rank = Rank(index, case.num_ranks, index)
        try:
            row = _take_part(case, rank, folder, f"file://{folder}/store-{place}")
        except UsageError as error:
            # every rank reads the same settings, so all of them refuse
            row = Row(case.name, num_ranks=case.num_ranks, verdict="left out", note=str(error))
        finally:
            leave_group()
        if rank.is_first:
            Storage().write_json(folder / f"row-{place}.json", row.to_json())


def _take_part(case: RankCase, rank: Rank, folder: Path, store: str) -> Row:
    config = make_config(case.config, origin=f"verify, {case.name}")
    device = choose_device(config.wanted_device, rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank.index, world_size=rank.world, timeout=WAIT)
    planned = plan_quietly(config, rank)
    with set_up_quietly(config, planned, rank, folder) as run:
        row = measure(run, planned.plan.step(case.step_index), Reference.read(Path(case.reference)), case.name)
    return row.judged(case.limit)


def main(folder: str, index: str) -> int:
    """One process of the group; a FlatoutError becomes its exit code."""
    try:
        run_process(Path(folder), int(index))
    except FlatoutError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
