"""Kills a run with SIGKILL at random moments until it has finished, then compares every bit with an undisturbed run.

    python benchmarks/kills.py --kills 50                           # one process, started again after each kill
    python benchmarks/kills.py --kills 20 --ranks 2 --save-every 5  # a random rank; the run recovers by itself
    python benchmarks/kills.py --kills 60 --rounds 20               # of rollouts; then takes 20 steps again
    python benchmarks/kills.py --kills 1 --save-every 20 --max-steps 100 --rows alpaca.json \\
        --tokenizer QWEN3_TOKENIZER_DIR     # LoRA of a Qwen3-0.6B shape on real rows

A tiny model learns the demo's rows in fp32 unless `--rows` says which; settings follow as overrides, `deterministic` is
true. One process saves at every step, so that about half of the kills land inside a save, and each of its lives is a
forked child, so that it starts at once. With ranks, `--hang` stops one (SIGSTOP) instead, detection is the time from
the signal to the first survivor's PeerLostError, and recovery that to the next finished step.

A kill of `--rounds` (of two steps) lands anywhere once a life has sampled, scored, trained or saved anything. Answers
that are sampled again have the same draws, but not always the last bit of their log-probabilities, as fewer are sampled
at once; so it is also counted how many tokens differ from the undisturbed run's, and steps are replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from bench.shapes import SHAPES
from rich.console import Console
from safetensors.torch import load_file

from flatout.config.read import load_config
from flatout.data.token_store import TokenStore
from flatout.demo.rounds import PROMPTS_FILE, write_tasks
from flatout.demo.write import write_demo
from flatout.errors import FlatoutError
from flatout.launch.attempt import RankReport
from flatout.track.console import ConsoleCallback
from flatout.track.run_log import read_run
from flatout.trainer.replay import replay
from flatout.trainer.run import train

DEADLINE_S = 180
# of a round
PROMPTS = 8


def write_config(root: Path, name: str, args: argparse.Namespace) -> Path:
    if args.rows:
        model, rows = root / "model", args.rows
    else:
        model, rows = root / "demo" / "model", root / "demo" / "train.jsonl"
    values: dict[str, Any] = {
        "run_dir": str(root / name),
        "deterministic": True,
        "model": {"name": str(model), "init": "random", "precision": "bf16" if args.rows else "fp32"},
        "data": {"name": "rows", "root": str(root / "data"), "sources": [{"path": str(rows)}], "num_procs": 1},
        "batch": {"samples_per_step": 32 if args.rows else 2 * args.ranks, "max_steps": args.max_steps},
        "checkpoint": {"every_steps": args.save_every, "keep": 2},
    }
    if args.rows:
        values |= {"lora": {"rank": 16, "dropout": 0.05}, "optim": {"lr": 1e-3}}
        values["batch"]["micro_batch_tokens"] = 8192
    else:
        values |= {"device": "cpu", "method": "full", "compile": "off"}
    if args.rounds:
        values["data"]["sources"] = [{"path": str(root / "demo" / PROMPTS_FILE)}]
        values["objective"], values["optim"] = "grpo", {"lr": 1e-3}
        reward = {"kind": "regex", "pattern": "[0-9]"}
        values["rollout"] = {"rounds": args.rounds, "prompts": PROMPTS, "group": 4, "steps": 2, "max_new_tokens": 24}
        values["rollout"] |= {"rewards": [reward]}
        values["checkpoint"]["keep"], values["batch"] = args.max_steps, {}
    if args.ranks > 1:
        values["gpus"] = list(range(args.ranks))
        values["faults"] = {"max_restarts": args.kills, "hang_s": args.hang_s}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def live(config: Path, overrides: list[str]) -> int:
    """One life of the run in a forked child; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    sys.stdout = sys.stderr = config.with_suffix(".out").open("a")
    try:
        train(load_config(config, overrides))
    except FlatoutError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)


def start(config: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    """The launched run, which starts its own ranks again."""
    command = [sys.executable, "-m", "flatout", "train", str(config), *overrides]
    with config.with_suffix(".out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def saved_step(run_dir: Path) -> int:
    folder = run_dir / "checkpoints"
    return max((int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()), default=0)


def num_recorded(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def survive(config: Path, run_dir: Path, args: argparse.Namespace, draw: random.Random) -> str:
    """Kill lives of one process, each after it resumed and saved again; returns what was struck."""
    num_mid_save = 0
    for life in range(args.kills):
        before, pid = saved_step(run_dir), live(config, args.overrides)
        more_steps = draw.randrange(args.save_every)

        def ended(pid: int = pid) -> bool:
            return bool(os.waitpid(pid, os.WNOHANG)[0])

        while saved_step(run_dir) <= before:
            if ended():
                sys.exit(f"life {life} ended by itself, resuming from step {before}")
            time.sleep(0.002)
        since = num_recorded(run_dir)
        while num_recorded(run_dir) < since + more_steps and not ended():
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        num_mid_save += any(".tmp-" in path.name for path in (run_dir / "checkpoints").iterdir())
    if os.waitpid(live(config, args.overrides), 0)[1]:
        sys.exit("the last life did not finish")
    return f"{args.kills} of {args.kills} kills resumed ({num_mid_save} struck inside a save)"


def survive_rounds(config: Path, run_dir: Path, args: argparse.Namespace, draw: random.Random) -> str:
    """Kill lives of a run of rounds, each after it left something new on disk; returns what was struck."""

    def journal() -> tuple[int, int]:
        """Groups that are sampled and scored in the round at hand."""
        lines = [
            line for path in run_dir.glob("rollouts/.round-*/rank-*.journal") for line in path.open() if "{" in line
        ]
        groups = [json.loads(line.partition(" ")[2]) for line in lines if line.endswith("\n")]
        return len({group["place"] for group in groups}), sum(bool(group["rewards"]) for group in groups)

    def progress() -> tuple[Any, ...]:
        stores = sorted(path.name for path in run_dir.glob("rollouts/round-*"))
        return stores, journal(), num_recorded(run_dir), saved_step(run_dir)

    struck: Counter[str] = Counter()
    for life in range(args.kills):
        before, pid = progress(), live(config, args.overrides)
        more_s = draw.choice((0.0, 0.02, 0.1, 0.3)) * draw.random()
        while progress() == before:
            if os.waitpid(pid, os.WNOHANG)[0]:
                sys.exit(f"life {life} ended by itself: {config.with_suffix('.out').read_text()[-2000:]}")
            time.sleep(0.001)
        time.sleep(more_s)
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            sys.exit(f"life {life} ended by itself")
        (sampled, scored), in_round = journal(), bool(list(run_dir.glob("rollouts/.round-*")))
        saving = any(".tmp-" in path.name for path in run_dir.glob("checkpoints/*"))
        is_scoring = "scoring" if scored < PROMPTS else "writing a round"
        of_round = "sampling" if sampled < PROMPTS else is_scoring
        struck[of_round if in_round else "saving" if saving else "training"] += 1
    if os.waitpid(live(config, args.overrides), 0)[1]:
        sys.exit(f"the last life did not finish: {config.with_suffix('.out').read_text()[-2000:]}")
    return f"{args.kills} of {args.kills} kills resumed: " + ", ".join(f"{n} {what}" for what, n in struck.items())


def compare_rounds(one: Path, other: Path) -> None:
    """Print how many sampled tokens of two runs differ, and their largest difference of log-probabilities."""
    num_tokens = num_differ = 0
    worst = 0.0
    for folder in sorted(one.glob("rollouts/round-??????")):
        a, b = TokenStore.open(folder), TokenStore.open(other / "rollouts" / folder.name)
        same = np.array_equal(a.offsets, b.offsets) and np.array_equal(a.token_ids, b.token_ids)
        num_tokens, num_differ = num_tokens + len(a.token_ids), num_differ + (0 if same else len(a.token_ids))
        if same:
            gap = np.abs(np.asarray(a.extra["sampler_logprob"]) - np.asarray(b.extra["sampler_logprob"]))
            worst = max(worst, float(gap.max()))
    print(f"{num_differ:,} of {num_tokens:,} tokens are in rounds that differ; log-probabilities within {worst:.1e}")


def replay_steps(run_dir: Path, count: int) -> bool:
    """Take the last steps of a run again, one by one; print and return whether all are equal to the bit."""
    last = read_run(run_dir).steps[-1].step
    with (run_dir / "replay.out").open("w") as out:
        console = ConsoleCallback(Console(file=out))
        equal = [replay(run_dir, step, console).is_equal for step in range(last - count + 1, last + 1)]
    print(f"{sum(equal)} of {count} steps replayed equal to the bit")
    return all(equal)


def wait_until(ready: Callable[[], bool], run: subprocess.Popen[bytes], what: str) -> float:
    """Seconds since 1970 when `ready()` first was true."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with code {run.returncode} before {what}")
        if time.monotonic() > deadline:
            run.kill()
            raise RuntimeError(f"no {what} within {DEADLINE_S} s")
        time.sleep(0.01)
    return time.time()


def strikes(
    run: subprocess.Popen[bytes], run_dir: Path, args: argparse.Namespace, draw: random.Random
) -> Iterator[tuple[float | None, float]]:
    """Detection and recovery of each strike at a random rank, in seconds."""
    for number in range(args.kills):
        before = num_recorded(run_dir)
        wait_until(lambda: num_recorded(run_dir) >= before + 3, run, "3 more steps")  # noqa: B023
        time.sleep(draw.random() * 0.5)
        struck_at, folder = time.time(), (run_dir / "logs" / "latest").resolve()
        report = draw.choice(RankReport.read_all(folder))
        os.kill(report.pid, signal.SIGSTOP if args.hang else signal.SIGKILL)
        wait_until(lambda: (run_dir / "logs" / "latest").resolve() != folder, run, "restart")  # noqa: B023
        time.sleep(0.1)
        since = num_recorded(run_dir)
        recovered_at = wait_until(lambda: num_recorded(run_dir) > since, run, "step after the restart")  # noqa: B023
        lost = [r.ended_at for r in RankReport.read_all(folder) if r.exit_code == 7 and r.ended_at is not None]
        seen, recovery_s = min(lost) - struck_at if lost else None, recovered_at - struck_at
        print(f"{number}: rank {report.rank}, told after {seen} s, next step after {recovery_s:.1f} s", flush=True)
        yield seen, recovery_s
    if run.wait():
        raise RuntimeError(f"the disturbed run ended with code {run.returncode}")


def recover(config: Path, run_dir: Path, args: argparse.Namespace, draw: random.Random) -> str:
    """Strike ranks of a launched run; returns how long it took."""

    def restarts() -> list[str]:
        lines = config.with_suffix(".out").read_text(errors="replace").splitlines()
        return [line for line in lines if "; restart " in line]

    run = start(config, args.overrides)
    try:
        times = list(strikes(run, run_dir, args, draw))
    except RuntimeError as error:
        tail = config.with_suffix(".out").read_text(errors="replace")[-2000:]
        sys.exit("\n".join([tail, *restarts(), str(error)]))
    if len(told := restarts()) > args.kills:
        print(f"{len(told)} restarts for {args.kills} kills:", *told, sep="\n")
    for what, values in (("detection", [a for a, _ in times if a is not None]), ("recovery", [b for _, b in times])):
        if values:
            print(f"{what}: median {statistics.median(values):.2f} s, worst {max(values):.2f} s over {len(values)}")
    return f"{len(times)} of {args.kills} recovered by themselves on {args.ranks} ranks"


def speed(name: str, run_dir: Path, wall_s: float) -> str:
    """The loss, rate and peak of a run."""
    steps = read_run(run_dir).steps
    steady = steps[len(steps) // 2 :]
    rate = sum(step.num_tokens for step in steady) / sum(step.step_s for step in steady)
    peak_gib = max(step.peak_memory_bytes for step in steps) / 2**30
    return (
        f"{name}: {len(steps)} steps, loss {steps[0].loss:.3f} -> {steps[-1].loss:.3f}, {rate:,.0f} tokens/s, "
        f"peak {peak_gib:.1f} GiB, wall {wall_s:.0f} s"
    )


def compare(one: Path, other: Path, num_steps: int) -> bool:
    """Print and return whether the last checkpoints' weights and states are equal to the bit."""
    folders = [run / "checkpoints" / f"step-{num_steps}" for run in (one, other)]
    all_same = True
    for file in sorted(path.name for path in folders[1].glob("*.safetensors")):
        a, b = (load_file(folder / file) for folder in folders)
        worst = max((float((a[key].double() - b[key].double()).abs().max()) for key in b if b[key].numel()), default=0)
        same = a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in b)
        all_same = all_same and same
        print(f"{file}: {'equal to the bit' if same else f'largest difference {worst:.3g}'}")
    return all_same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hang", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--hang-s", type=float, default=10.0)
    parser.add_argument("--steps-per-kill", type=int, help="10; of ranks 50")
    parser.add_argument("--max-steps", type=int, help="of the whole run, instead of --steps-per-kill")
    parser.add_argument("--rounds", type=int, help="kill a run of so many rounds of rollouts")
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="rows for a Qwen3-0.6B shape")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    per_kill = args.steps_per_kill or (10 if args.ranks == 1 else 50)
    args.max_steps = args.max_steps or per_kill * (args.kills + (args.ranks > 1))
    args.max_steps = 2 * args.rounds if args.rounds else args.max_steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if args.rows:
            shutil.copytree(args.tokenizer, root / "model")
            (root / "model" / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
        else:
            write_demo(root / "demo", 42, num_train=200 * args.ranks, num_held_out=10)
            write_tasks(root / "demo", 42)
        killed, whole = (write_config(root, name, args) for name in ("killed", "whole"))
        disturb = survive_rounds if args.rounds else survive if args.ranks == 1 else recover
        told, started_s = disturb(killed, root / "killed", args, random.Random(args.seed)), time.monotonic()
        failed = (
            os.waitpid(live(whole, args.overrides), 0)[1] if args.ranks == 1 else start(whole, args.overrides).wait()
        )
        if failed:
            sys.exit(f"the undisturbed run failed:\n{whole.with_suffix('.out').read_text()[-2000:]}")
        print(speed("undisturbed", root / "whole", time.monotonic() - started_s))
        same = compare(root / "killed", root / "whole", args.max_steps)
        if args.rounds:
            compare_rounds(root / "killed", root / "whole")
            same = replay_steps(root / "killed", 20)
    print(told)
    sys.exit(not same)


if __name__ == "__main__":
    main()
