"""The fair protocol: equal tokens or an error, pairs in turns, rates by intervals, verdicts by the asked ratios."""

import json
from types import SimpleNamespace

import pytest
from bench.inputs import write_model
from bench.ours import balance_of, load_s
from bench.protocol import Settings, in_turns, run_rows
from bench.report import markdown, ratios, summary
from bench.rows import Row, Target

from flatout.track.callback import MemoryCallback

PEER = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
if job.get("fails"):
    sys.exit("no such kernel")
import bench.machine  # what benchmarks share is on a peer's Python path
from bench.samples import digest
from flatout.data.token_store import TokenStore
store = TokenStore.open(pathlib.Path(job["store"]))
found = digest(store.token_ids, store.loss_mask)
result = {"digest": found[::-1] if job.get("cheats") else found, "tokens_per_s": job["rate"], "label_tokens_per_s": 1.0,
          "step_p50_s": 1.0, "step_p95_s": 1.0, "launch_to_first_step_s": 1.0, "losses": [2.0, 1.0]}
pathlib.Path(job["result"]).write_text(json.dumps(result))
"""


def test_loading_is_the_time_before_the_models_first_line():
    recorder = MemoryCallback()
    recorder.stages = [(1.0, "plan", "3 steps"), (4.5, "model", "a"), (6.0, "model", "b")]
    assert load_s(recorder) == 3.5


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder in which the tiny model is made already."""
    folder = tmp_path_factory.mktemp("work")
    write_model("tiny", folder / "tiny" / "model")
    (folder / "peer.py").write_text(PEER)
    return folder


def settings_of(work, tmp_path, **other) -> Settings:
    values = {"num_steps": 4, "num_repeats": 1, **other}
    return Settings(out=tmp_path, work=work, peer_program=work / "peer.py", **values)


def peer(name: str, **settings) -> Row:
    return Row(name, "peer", "tiny", {"rate": 10.0, **settings})


def test_every_second_pass_goes_backwards():
    rows = [peer("a"), peer("b"), peer("c")]
    assert [(repeat, row.name) for repeat, row in in_turns(rows, 3)] == [
        *((0, name) for name in "abc"), *((1, name) for name in "cba"), *((2, name) for name in "abc"),
    ]  # fmt: skip


def test_rows_run_and_wrong_tokens_and_failures_are_told(work, tmp_path):
    rows = [peer("good"), peer("cheat", cheats=True), peer("broken", fails=True)]
    said: list[str] = []
    results = run_rows(rows, settings_of(work, tmp_path), said.append)
    by_name = {run["row"]: run for run in results["runs"]}
    assert "error" not in by_name["good"]
    assert "trained on other tokens" in by_name["cheat"]["error"]
    assert "no such kernel" in by_name["broken"]["error"]
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == results["runs"]
    table = markdown(results)
    assert "| cheat | peer | - |" in table
    assert "10 (10 to 10)" in table
    assert "tiny, 32 samples a step, random tokens of chat lengths. " in table
    told = summary(results, [Target("good", "good", 0.5)]).splitlines()
    width = max(len(row["name"]) for row in results["rows"])
    assert told == [f"{'good':<{width}} 10 (10 to 10) tokens/s", "good / good: 1.00x, target 0.5x"]


def results_of(ours: list[float], theirs: list[float]) -> dict:
    rows = [
        {"name": name, "system": name, "shape": "tiny", "settings": {}, "samples_per_step": 32}
        for name in ("flatout", "peer")
    ]
    runs = [
        {"row": name, "repeat": repeat, "tokens_per_s": rate, "peak_allocated_gib": 5.0}
        for name, rates in (("flatout", ours), ("peer", theirs))
        for repeat, rate in enumerate(rates)
    ]
    common = {
        "label_tokens_per_s": 1.0,
        "step_p50_s": 1.0,
        "step_p95_s": 1.0,
        "launch_to_first_step_s": 1.0,
        "losses": [1.0],
    }
    return {
        "header": {"gpu": {}, "versions": {}, "started": ""},
        "protocol": {"num_steps": 4, "left_out_steps": 3, "order": ""},
        "rows": rows,
        "inputs": {"tiny, 32 samples a step, random tokens of chat lengths": {}},
        "runs": [{**run, **common} for run in runs],
    }


def test_a_ratio_is_of_pairs_of_one_repeat():
    results = results_of([20.0, 30.0, 99.0], [10.0, 20.0])
    target = Target("flatout", "peer", min_ratio=1.7)
    assert ratios(results, target) == [2.0, 1.5]
    assert "**1.75x** (1.50 to 2.00), 30 tokens/s | >= 1.7x | met |" in markdown(results, [target])
    missed = (
        Target("flatout", "peer", 1.8),
        Target("flatout", "peer", 1.0, 31.0),
        Target("flatout", "peer", 1.0, None, 4),
    )
    for target in missed:
        assert "| missed |" in markdown(results, [target])


def test_the_measured_balance_stands_beside_the_planned_one():
    figures = ((0.99, 1.0, 2.0), (0.97, 3.0, 3.0))
    steps = [SimpleNamespace(balance=a, busy_min_s=b, busy_max_s=c) for a, b, c in figures]
    assert balance_of(steps) == pytest.approx({"planned_balance": 0.98, "least_by_most_busy": 0.75, "busy_max_s": 2.5})
    assert balance_of([SimpleNamespace(balance=1.0, busy_min_s=None, busy_max_s=None)]) == {}
