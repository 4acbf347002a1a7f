"""The rows of `flatout verify` that need several processes, which communicate through JSON files.

    python -m flatout.verifier.ranks FOLDER INDEX

runs one of the processes; it reads the job from the folder and writes the rows there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatout.config.read import make_config
from flatout.errors import FlatoutError, PeerLostError, ResourceError, UsageError, exits_refused
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json
from flatout.io.own_files import kill_group, start_python
from flatout.parallel.process_group import choose_device, leave_group
from flatout.parallel.rank import Rank
from flatout.verifier.compare import Comparison, Reference, measure, plan_quietly, set_up_quietly

# how long a rank waits for the others in its group
WAIT = timedelta(minutes=10)
JOB = "job.json"


@dataclass(frozen=True, slots=True)
class RankCase:
    """One row on several ranks: step `step_index` of `config`, compared with the reference in folder `reference`."""

    name: str
    num_ranks: int
    config: dict[str, Any]
    step_index: int
    reference: str
    limit: float


def run_rank_cases(cases: Sequence[RankCase], folder: Path) -> list[Comparison]:
    """Run all cases in one set of processes, each in its own session, which are killed when this call ends.

    If a process dies, the remaining cases fail with the last line of its log. Raises ResourceError if that process
    lacked a GPU or memory.
    """
    folder.mkdir()
    DurableIO().write_json(folder / JOB, {"cases": [asdict(case) for case in cases]})
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(max(case.num_ranks for case in cases)):
            words = ["-P", "-m", "flatout.verifier.ranks", str(folder), str(index)]
            processes.append(start_python(words, folder / f"rank-{index}.log"))
        lost = _wait(processes)
    finally:
        for process in processes:
            kill_group(process)
            process.wait()
    why = ""
    if lost is not None:
        # the last error in its log, which a stack trace may follow, or the last line
        log_text = (folder / f"rank-{lost}.log").read_text(errors="replace").strip()
        # torch begins each line of a traceback with the rank, once for every process group of the process
        lines = re.sub(r"^(\[rank\d+\]: )+", "", log_text, flags=re.MULTILINE).splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        why = (errors or lines or ["no output"])[-1]
        if processes[lost].returncode == ResourceError.exit_code:
            raise ResourceError(f"verify, rank {lost}: {why}")
    paths = [folder / f"row-{place}.json" for place in range(len(cases))]
    return [
        Comparison(**read_json(path))
        if path.exists()
        else Comparison(case.name, num_ranks=case.num_ranks, limit=case.limit, note=f"rank {lost} ended: {why}")
        for case, path in zip(cases, paths, strict=True)
    ]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all processes have succeeded and return None, or until one fails and return its index."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            # skip ranks that failed only because a peer did
            return min(failed, key=lambda index: codes[index] == PeerLostError.exit_code)
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)


def run_process(folder: Path, index: int) -> None:
    """Run this process's rank of every case with more than `index` ranks. Raises FlatoutError."""
    torch.set_num_threads(1)
    cases = [RankCase(**values) for values in read_json(folder / JOB)["cases"]]
    for place, case in enumerate(cases):
        if index >= case.num_ranks:
            continue
        rank = Rank(index, case.num_ranks, index)
        try:
            config = make_config(case.config, origin=f"verify, {case.name}")
            device = choose_device(config.wanted_device, rank)
            backend, store = "nccl" if device.type == "cuda" else "gloo", f"file://{folder}/store-{place}"
            dist.init_process_group(backend, store, rank=rank.index, world_size=rank.world, timeout=WAIT)
            planned, reference = plan_quietly(config, rank), Reference.read(Path(case.reference))
            with set_up_quietly(config, planned, rank, folder) as run:
                row = measure(run, run.plan.step(case.step_index), reference, case.name).judged(case.limit)
        except UsageError as error:
            # every rank reads the same settings, so all of them raise this
            row = Comparison(case.name, num_ranks=case.num_ranks, verdict="left out", note=error.text)
        finally:
            leave_group()
        if rank.is_first:
            DurableIO().write_json(folder / f"row-{place}.json", row.to_json())


if __name__ == "__main__":
    try:
        with exits_refused():
            run_process(Path(sys.argv[1]), int(sys.argv[2]))
    except FlatoutError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
