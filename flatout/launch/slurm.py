"""Write an sbatch script for a run, to be read, edited and submitted by hand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import UsageError

PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


def sbatch_script(
    name: str,
    nodes: int,
    gpus_per_node: int,
    words: Sequence[str],
    *,
    folder: Path,
    log_dir: Path,
    python: str,
    partition: str | None = None,
    account: str | None = None,
    time: str = "24:00:00",
    max_restarts: int = 3,
) -> str:
    """Return the script: one task per GPU, ranks from srun, and a signal to save before the time limit.

    `time` is in Slurm's format, such as 12:00:00 or 2-00:00:00; the job runs in `folder`. Raises UsageError for a name
    or time that is not valid in an #SBATCH line.
    """
    for option, text in (("--name", name), ("--partition", partition), ("--account", account)):
        if text is not None and not PLAIN.fullmatch(text):
            raise UsageError(f"{option} {text!r}: expected letters, digits, dot, _ and -")
    if not TIME.fullmatch(time):
        raise UsageError(f"--time {time!r}: expected Slurm's format, such as 12:00:00 or 2-00:00:00")
    options = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": gpus_per_node,
        "gpus-per-node": gpus_per_node,
        "cpus-per-task": 8,
        "time": time,
        "partition": partition,
        "account": account,
        # five minutes before the time limit every rank gets SIGTERM; the run saves and exits with code 75
        "signal": "TERM@300",
    }
    lines = "\n".join(f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None)
    return f"""#!/bin/bash
{lines}
#SBATCH --requeue

set -u
cd -- {shlex.quote(str(folder))} || exit 2
# Slurm does not create the folder of its log, so this script does
logs={shlex.quote(str(log_dir))}
mkdir -p -- "$logs" || exit 6
echo "the log is $logs/slurm-$SLURM_JOB_ID.log"
exec >>"$logs/slurm-$SLURM_JOB_ID.log" 2>&1
# ranks authenticate each other with it; it is not stored
FLATOUT_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export FLATOUT_SECRET
srun --kill-on-bad-exit=1 -- {shlex.join([python, "-m", "flatout", *words])}
code=$?
# 75: stopped and saved; 7: a rank was lost; both resume from the newest checkpoint
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
if [ "$code" -eq 7 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
