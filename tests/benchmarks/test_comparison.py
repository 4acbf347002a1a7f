"""The fair protocol: equal tokens or an error, pairs in turns, rates by intervals, verdicts by the asked ratios."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.__main__ import main
from bench.inputs import write_model, write_samples
from bench.ours import balance_of, base_values, load_s
from bench.protocol import Settings, in_turns, last_words, run_rows
from bench.report import markdown, ratios, summary
from bench.rows import OURS, Row, Target, choose, mode_of, read_parity, read_peers
from bench.samples import REASONING
from bench.shapes import SHAPES, shape_config

from flatout.config.read import make_config
from flatout.errors import UsageError
from flatout.track.callback import MemoryCallback
from flatout.trainer.model_shape import make_shape

ROOT = Path(__file__).parents[2]
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


def test_a_rows_name_says_how_many_gpus_share_how_many_samples():
    [one, two, many] = choose([peer("a")], ["a", "a@2", "a@4x128"])
    assert [(row.num_gpus, row.samples_per_step) for row in (one, two, many)] == [(1, 32), (2, 32), (4, 128)]
    assert (two.system, two.shape, two.settings) == (one.system, one.shape, one.settings)
    renamed = Row("a-nf4", "peer", "tiny", aliases=("a-lean",))
    assert [row.name for row in choose([renamed], ["a-lean", "a-lean@2x64"])] == ["a-nf4", "a-nf4@2x64"]
    [long] = choose(OURS, ["llama-8b-reasoning-fp8@2x16"])
    assert (long.lengths, long.num_gpus, long.samples_per_step) == ("reasoning", 2, 16)
    with pytest.raises(UsageError, match="multiple of 8"):
        choose(OURS, ["llama-8b-reasoning-fp8@1x12"])
    for name in ("a@0", "a@", "a@3", "a@2x48", "b@2"):
        with pytest.raises(UsageError, match="--rows"):
            choose([peer("a")], [name])


def test_every_second_pass_goes_backwards():
    rows = [peer("a"), peer("b"), peer("c")]
    assert [(repeat, row.name) for repeat, row in in_turns(rows, 3)] == [
        *((0, name) for name in "abc"), *((1, name) for name in "cba"), *((2, name) for name in "abc"),
    ]  # fmt: skip


def test_real_samples_keep_their_order_and_too_few_are_refused(work, tmp_path):
    model_dir = work / "tiny" / "model"
    source = write_samples(tmp_path / "source", peer("a"), model_dir, 4)
    taken = write_samples(tmp_path / "taken", peer("a"), model_dir, 2, source.folder)
    assert taken.num_samples == 64
    assert taken.token_ids.tolist() == source.token_ids[: taken.offsets[-1]].tolist()
    assert taken.loss_mask[:].tolist() == source.loss_mask[: taken.offsets[-1]].tolist()
    with pytest.raises(UsageError, match="128 samples, the steps need 160"):
        write_samples(tmp_path / "more", peer("a"), model_dir, 5, source.folder)


def test_random_samples_have_the_lengths_of_their_row(work, tmp_path):
    row = Row("a", "peer", "tiny", lengths="reasoning", samples_per_step=16)
    store = write_samples(tmp_path, row, work / "tiny" / "model", 2)
    assert store.lengths.tolist() == [n for group in range(4) for n in REASONING.group(group)]
    assert 2048 < store.lengths.max() <= 16384


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_can_be_planned(name):
    shape = make_shape(shape_config(name))
    assert shape.num_layers == SHAPES[name]["num_hidden_layers"]


def test_the_peers_rows_are_well_formed():
    peers = read_peers(ROOT / "benchmarks" / "peers")
    names = {row.name for row in (*OURS, *peers.rows)}
    assert len(names) == len(OURS) + len(peers.rows)
    asked = [name for target in peers.targets for name in (target.row, target.peer)]
    assert [row.name for row in choose([*OURS, *peers.rows], asked)] == asked
    assert all(row.shape in SHAPES for row in peers.rows)
    assert (ROOT / "benchmarks" / "peers" / peers.trainer).exists()
    # padded or with a dense mask a peer is not at its best: only rows that say so may go without FlashAttention
    for row in peers.rows:
        assert row.settings.get("fa2") or row.settings.get("defaults") or row.system != "unsloth", row.name


def test_our_rows_parse_and_have_a_mode():

    job = {"run_dir": "r", "model_dir": "m", "data_root": "d", "num_steps": 5, "samples_per_step": 32}
    for row in OURS:
        config = make_config(base_values(job), row.settings["overrides"])
        assert mode_of(row).startswith("bf16" if config.base.storage == "model" else config.base.storage)
        assert mode_of(row).endswith("fp8") == config.base.computes_in_fp8


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


def test_the_time_limit_stops_before_a_run(work, tmp_path):
    results = run_rows([peer("a"), peer("b")], settings_of(work, tmp_path, time_limit_s=1.0), lambda text: None)
    assert results["runs"] == []
    assert results["stopped"] == "time limit before repeat 1 of a"
    assert json.loads((tmp_path / "results.json").read_text())["stopped"] == results["stopped"]


def test_peers_without_their_program_are_refused(work, tmp_path):
    with pytest.raises(UsageError, match="row a needs --peers"):
        run_rows([peer("a")], Settings(out=tmp_path, work=work), lambda text: None)
    with pytest.raises(UsageError, match="no row 'b'; there are a"):
        choose([peer("a")], ["b"])
    with pytest.raises(UsageError, match=r"rows\.json cannot be used"):
        read_peers(tmp_path)
    with pytest.raises(UsageError, match="--parity"):
        read_parity(work / "peer.py")


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


def test_curves_of_one_and_of_many_gpus_are_compared():
    results = results_of([20.0], [10.0])
    for run, row, losses in zip(results["runs"], results["rows"], ([2.0, 1.0], [2.0, 1.1]), strict=True):
        run["row"] = row["name"] = "a@2" if losses[1] > 1 else "a"
        run.update(losses=losses, digest="d")
    assert "- loss of a@2 beside a: 1.0e-01 apart at most over 2 steps" in markdown(results)
    results["runs"][0]["digest"] = "other"
    assert "apart" not in markdown(results)


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


def test_what_a_rank_said_is_the_reason_and_not_what_torchrun_says_of_it() -> None:
    said = "loading\nerror: rank 0 on host-a, step 1: has been silent for 48 s\nThread 0x7f (most recent call first):\n"
    launcher = "W1122 03:59:14 1 torch/distributed/elastic/multiprocessing/api.py:1012] Sending process 5 SIGTERM\n"
    trace = "Traceback (most recent call last):\n" + "  File torch/distributed/run.py\n" * 200
    words = last_words(said + launcher + trace)
    assert words.startswith("loading")
    assert words.endswith("\nerror: rank 0 on host-a, step 1: has been silent for 48 s")
    assert "torch/distributed" not in words
    assert last_words("one process\nValueError: 3\n") == "one process\nValueError: 3"


def test_rows_are_listed_within_80_columns(capsys):
    assert main(["--list", "--peers", str(ROOT / "benchmarks" / "peers")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("8b-fp8 ") for line in lines)
    assert any(line.startswith("8b-unsloth-bf16 ") for line in lines)


def test_an_unknown_row_is_one_line(capsys, tmp_path):
    assert main(["--rows", "9b", "--out", str(tmp_path)]) == 2
    assert "--rows: no row '9b'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_tiny_row_is_measured_from_the_command_line(tmp_path):
    gate = tmp_path / "parity.json"
    gate.write_text(json.dumps({"green": {"bf16": True}}))
    argv = ["--rows", "tiny", "--steps", "4", "--repeats", "1", "--out", str(tmp_path / "out"), "--parity", str(gate)]
    command = [sys.executable, "-m", "benchmarks.bench", *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (run,) = results["runs"]
    [given] = results["inputs"].values()
    assert run["digest"] == given["digest"]
    assert len(run["losses"]) == len(run["steps_s"]) == 4
    # random weights over 1,024 tokens: the loss is near ln 1024
    assert run["losses"][0] == pytest.approx(6.93, abs=0.1)
    assert run["tokens_per_s"] > run["label_tokens_per_s"] > 0
    assert "green" in (tmp_path / "out" / "results.md").read_text()
    assert "tokens/s, peak " in done.stdout
