"""Ranks that are killed or stopped in mid-run: named in time, started again, and the same weights at the end."""

import json
import os
import re
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch
from launching import DEADLINE_S, launch, num_steps_told, settings, wait_for_steps
from safetensors.torch import load_file
from spawned_ranks import start_warm_ranks

from flatout.config.read import dump_config
from flatout.launch.attempt import RankReport

HANG_S = 3.0
# ranks, where some of them stop during the start, and what the others say; nobody stops in the first case
JOINS = (
    (2, (), {}),
    (
        2,
        ("0:before",),
        {1: r"PeerLostError 0: timed out waiting for rank 0 of 2 at 127.0.0.1:\d+, 3 s .faults.join_s."},
    ),
    (2, ("0:met",), {1: r"PeerLostError 0: timed out waiting for rank 0 of 2 at 127.0.0.1:\d+, 3 s"}),
    (3, ("1:before", "2:before"), {0: r"PeerLostError 1: timed out waiting for ranks 1, 2 of 3, 3 s"}),
)


def strike(run_dir: Path, attempt: int, rank: int, number: int) -> float:
    """Send a rank of this attempt a signal once the run has gone on; seconds since 1970."""
    folder = run_dir / "logs" / f"attempt-{attempt}"
    deadline = time.monotonic() + DEADLINE_S
    while len(RankReport.read_all(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    wait_for_steps(run_dir, num_steps_told(run_dir) + 3)
    os.kill(RankReport.read_all(folder)[rank].pid, number)
    return time.time()


def kill_launcher(process: subprocess.Popen[str], run_dir: Path, attempt: int) -> None:
    """Kill the command once this attempt has made steps; its ranks must save and end."""
    folder = run_dir / "logs" / f"attempt-{attempt}"
    deadline = time.monotonic() + DEADLINE_S
    while len(RankReport.read_all(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    wait_for_steps(run_dir, num_steps_told(run_dir) + 3)
    process.kill()
    while any(Path(f"/proc/{rank.pid}").exists() for rank in RankReport.read_all(folder)):
        assert time.monotonic() < deadline, "a rank was left running"
        time.sleep(0.1)
    assert [rank.exit_code for rank in RankReport.read_all(folder)] == [75, 75]


def test_every_start_of_ranks_is_bounded_and_names_who_has_not_come(tmp_path):
    """The launcher's socket connects others to a stopped rank 0, and torch's store waits without a limit."""
    script = str(Path(__file__).with_name("joining_ranks.py"))
    begun = []
    for world, stops, _ in JOINS:
        # in the first case nobody is to be late, however slow the machine is
        words = [script, "3" if stops else str(DEADLINE_S), *stops]
        begun.append(start_warm_ranks(world, lambda _, words=words: words, tmp_path / f"case-{len(begun)}"))
    try:
        for ranks, (world, stops, said) in zip(begun, JOINS, strict=True):
            going = set(range(world)) - {int(place[0]) for place in stops}
            for rank in going:
                output = ranks[rank].communicate(timeout=DEADLINE_S)[0]
                assert re.search(said.get(rank, f"sum {world}"), output), output
                assert ranks[rank].returncode == (7 if stops else 0)
    finally:
        for process in (process for ranks in begun for process in ranks):
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_killed_rank_a_stopped_one_and_a_killed_launcher(tiny, tmp_path, metrics_of):
    """SIGKILL rank 0, which holds the watch; SIGSTOP rank 1; SIGKILL the launcher: the run ends as one process ends.

    Ranks whose launcher is gone are told by the kernel, save once and stop; the run goes on from there in one process.
    """
    from flatout.trainer.run import train

    made = settings(tiny, batch={"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 120})
    made["checkpoint"] = {"every_steps": 5}
    run_dir = tmp_path / "run"
    config = tiny.config(run_dir, **made, faults={"hang_s": HANG_S, "max_restarts": 2})
    process = launch(config, tmp_path)
    strike(run_dir, 0, rank=0, number=signal.SIGKILL)
    stopped_at = strike(run_dir, 1, rank=1, number=signal.SIGSTOP)
    kill_launcher(process, run_dir, attempt=2)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert "restart 1 of 2" in output
    (killed,) = (r for r in RankReport.read_all(run_dir / "logs" / "attempt-0") if r.exit_code == 7)
    assert killed.lost_rank == 0
    # not the step of its last heartbeat
    assert re.search(r"died in step \d+", str(killed.error))
    (stopped,) = (r for r in RankReport.read_all(run_dir / "logs" / "attempt-1") if r.exit_code == 7)
    assert stopped.lost_rank == 1
    assert "rank 1 on" in output
    assert "has been silent for" in output
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (lost,) = (event for event in events if event["kind"] == "peer_lost")
    assert lost["rank"] == 1
    assert "last heard of" not in output
    assert lost["phase"] in ("start", "step", "sum", "save")
    # how soon is proved with a clock in test_heartbeat
    assert datetime.fromisoformat(lost["time"]).timestamp() >= int(stopped_at)
    train(tiny.config(tmp_path / "alone", **{**made, "gpus": None}))
    train(config.model_copy(update={"gpus": None}))
    assert "from step" in (run_dir / "train.log").read_text()
    assert [record["step"] for record in metrics_of(run_dir)] == list(range(1, 121))
    weights = [load_file(f / "checkpoints/step-120/model.safetensors") for f in (run_dir, tmp_path / "alone")]
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_skip_the_spikes_of_one_process(tiny, tmp_path, strategy):
    from flatout.trainer.run import train

    made = settings(tiny, batch={"samples_per_step": 2, "micro_batch_tokens": 600, "max_steps": 50}, optim={"lr": 3e-2})
    made |= {"faults": {"spike": "skip", "spike_sigmas": 0.4, "max_restarts": 0}}
    train(tiny.config(tmp_path / "alone", **{**made, "gpus": None}))
    process = launch(tiny.config(tmp_path / "run", **made, strategy=strategy), tmp_path)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output
    told = []
    for name in ("alone", "run"):
        lines = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        told.append([(line["kind"], line["step"]) for line in lines if line["kind"] in ("loss_spike", "skipped")])
    assert told[0] == told[1] != []
    assert sorted(path.name for path in (tmp_path / "run" / "spikes").iterdir()) == sorted(
        path.name for path in (tmp_path / "alone" / "spikes").iterdir()
    )


@pytest.mark.parametrize(
    "sections",
    [
        # each pass gathers weights from both ranks, so they must leave before the same one
        {"strategy": "fsdp"},
        pytest.param({"strategy": "ddp"}, marks=pytest.mark.exhaustive),
        pytest.param({"strategy": "ddp", "context": {"parallel": 2}}, marks=pytest.mark.exhaustive),
    ],
    ids=["fsdp", "ddp", "context"],
)
def test_a_stop_of_one_rank_ends_the_evaluation_of_all(tiny, tmp_path, sections):
    batch = {"samples_per_step": 7, "micro_batch_tokens": 300, "max_steps": 2}
    made = settings(tiny, batch=batch, data={"max_tokens": 300, "too_long": "drop"}, **sections)
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run", **made, eval={"fraction": 0.5})))
    words = [str(Path(__file__).with_name("stopping_ranks.py")), str(tmp_path / "run.yaml")]
    ranks = start_warm_ranks(2, lambda _: words, tmp_path)
    outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], outputs
    told = [re.search(r"passes (\d+): stop requested: saved at step 0", output) for output in outputs]
    passes = [int(one[1]) for one in told if one]
    # ranks that share passes agree one pass later; with whole weights the other ends its own
    assert passes == [3, 3] if sections != {"strategy": "ddp"} else passes[1] == 2
    assert not any(line["kind"] == "eval" for line in map(json.loads, metrics_lines(tmp_path / "run")))


def metrics_lines(run_dir: Path) -> list[str]:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().splitlines() if metrics.exists() else []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rank_that_is_lost_twice_is_left_out(tiny, tmp_path, metrics_of):
    made = settings(tiny, batch={"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 120})
    faults = {"hang_s": HANG_S, "min_ranks": 1}
    run_dir = tmp_path / "run"
    process = launch(tiny.config(run_dir, **made, checkpoint={"every_steps": 5}, faults=faults), tmp_path)
    for attempt in range(2):
        strike(run_dir, attempt, rank=1, number=signal.SIGKILL)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output
    assert "restart 1 of 3 with 2 ranks here" in output
    assert "restart 2 of 3 with 1 rank here" in output
    assert [record["step"] for record in metrics_of(run_dir)] == list(range(1, 121))
