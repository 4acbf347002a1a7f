"""The fair protocol: equal tokens or an error, pairs in turns, rates by intervals, verdicts by the asked ratios."""

import json
from pathlib import Path

import pytest

from flatout.bench.inputs import MAX_ID, chat_lengths, chat_samples, digest, write_model, write_store
from flatout.bench.measure import figures
from flatout.bench.ours import balance_of, load_s, stage_lines, step_ends
from flatout.bench.protocol import Settings, in_turns, last_words, run_rows
from flatout.bench.report import markdown, ratios, svg
from flatout.bench.rows import OURS, Row, Target, choose, mode_of, read_parity, read_peers
from flatout.bench.shapes import SHAPES, shape_config
from flatout.errors import UsageError
from flatout.plan.shape import ModelShape

ROOT = Path(__file__).parents[3]
PEER = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
if job.get("fails"):
    sys.exit("no such kernel")
from flatout.bench.inputs import digest
from flatout.data.store import TokenStore
store = TokenStore.open(pathlib.Path(job["store"]))
found = digest(store.token_ids, store.trained)
result = {"digest": found[::-1] if job.get("cheats") else found, "useful_tok_s": job["rate"], "label_tok_s": 1.0,
          "step_p50_s": 1.0, "step_p95_s": 1.0, "launch_to_first_step_s": 1.0, "losses": [2.0, 1.0]}
pathlib.Path(job["result"]).write_text(json.dumps(result))
"""


def test_loading_is_the_time_before_the_models_first_line(tmp_path):
    stamp = "2026-01-01T00:00:{}+00:00"
    texts = [("01", "plan 3 steps"), ("04.5", "model a"), ("06", "model b"), ("07", '{"kind": "step"}')]
    (tmp_path / "train.log").write_text("".join(f"{stamp.format(at)} {text}\n" for at, text in texts))
    stages = stage_lines(tmp_path / "train.log")
    assert ([text for _, text in stages], load_s(stages)) == (["plan 3 steps", "model a", "model b"], 3.5)


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


def test_rates_are_tokens_over_intervals_without_the_warm_up():
    found = figures([10.0, 11.0, 12.0, 14.0, 15.0], 3.0, [7, 7, 7, 100, 200], [1, 1, 1, 50, 60])
    assert found["useful_tok_s"] == 300 / 3
    assert found["label_tok_s"] == 110 / 3
    assert found["launch_to_first_step_s"] == 7.0
    assert found["step_p50_s"] == 1.5
    assert found["step_p95_s"] == 2.0


def test_step_ends_are_the_first_one_s_time_and_the_device_s_own_after_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "step", "step_s": 9.0}\n{"kind": "eval"}\n{"kind": "step", "step_s": 1.25}\n'
    )
    (tmp_path / "train.log").write_text(
        "2026-01-01T00:00:00.000+00:00 model      qwen3\n"
        '2026-01-01T00:00:01.500+00:00 {"kind": "step", "step": 1}\n'
        '2026-01-01T00:00:01.600+00:00 {"kind": "eval", "step": 1}\n'
        '2026-01-01T00:00:02.750+00:00 {"kind": "step", "step": 2}\n'
    )
    ends = step_ends(tmp_path)
    assert len(ends) == 2
    assert ends[1] - ends[0] == pytest.approx(1.25)


def test_a_rows_name_says_how_many_gpus_share_how_many_samples():
    [one, two, many] = choose([peer("a")], ["a", "a@2", "a@4x128"])
    assert [(row.num_gpus, row.samples_per_step) for row in (one, two, many)] == [(1, 32), (2, 32), (4, 128)]
    assert (two.system, two.shape, two.settings) == (one.system, one.shape, one.settings)
    for name in ("a@0", "a@", "a@3", "a@2x48", "b@2"):
        with pytest.raises(UsageError, match="--rows"):
            choose([peer("a")], [name])


def test_every_second_pass_goes_backwards():
    rows = [peer("a"), peer("b"), peer("c")]
    assert [(repeat, row.name) for repeat, row in in_turns(rows, 3)] == [
        *((0, name) for name in "abc"), *((1, name) for name in "cba"), *((2, name) for name in "abc"),
    ]  # fmt: skip


def test_chat_samples_are_seeded_by_step():
    ids, trained, lengths = chat_samples(2, 151936)
    assert lengths.tolist() == chat_lengths(0) + chat_lengths(1)
    assert min(lengths) >= 32
    assert max(lengths) <= 2048
    assert ids.min() >= 4
    assert ids.max() < MAX_ID
    assert trained.sum() / len(trained) == pytest.approx(0.6, abs=0.01)
    # the first token of a sample has nothing before it
    assert not trained[lengths.cumsum() - lengths].any()
    other = chat_samples(2, 151936)
    assert digest(ids, trained) == digest(other[0], other[1])
    trained[-1] = False
    assert digest(ids, trained) != digest(other[0], other[1])


def test_real_samples_keep_their_order_and_too_few_are_refused(work, tmp_path):
    model_dir = work / "tiny" / "model"
    source = write_store(tmp_path / "source", model_dir, 4, None)
    taken = write_store(tmp_path / "taken", model_dir, 2, source.folder)
    assert taken.num_samples == 64
    assert taken.token_ids.tolist() == source.token_ids[: taken.offsets[-1]].tolist()
    assert taken.trained.tolist() == source.trained[: taken.offsets[-1]].tolist()
    with pytest.raises(UsageError, match="128 samples, the steps need 160"):
        write_store(tmp_path / "more", model_dir, 5, source.folder)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_known_to_the_plan(name):
    shape = ModelShape.from_config(shape_config(name))
    assert shape.known
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
    from flatout.bench.ours import base_values
    from flatout.config.read import make_config

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
    assert svg(results).count("<rect") == 2


def test_the_time_limit_stops_before_a_run(work, tmp_path):
    results = run_rows([peer("a"), peer("b")], settings_of(work, tmp_path, time_limit_s=1.0), lambda text: None)
    assert results["runs"] == []
    assert results["stopped"] == "time limit before repeat 1 of a"


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
        {"row": name, "repeat": repeat, "useful_tok_s": rate, "peak_allocated_gib": 5.0}
        for name, rates in (("flatout", ours), ("peer", theirs))
        for repeat, rate in enumerate(rates)
    ]
    common = {"label_tok_s": 1.0, "step_p50_s": 1.0, "step_p95_s": 1.0, "launch_to_first_step_s": 1.0, "losses": [1.0]}
    return {
        "header": {"gpu": {}, "versions": {}, "started": ""},
        "protocol": {"data": "", "num_steps": 4, "left_out_steps": 3, "order": ""},
        "rows": rows,
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
    assert "**1.75x** (1.50 to 2.00), 30 tok/s | >= 1.7x | met |" in markdown(results, [target])
    missed = (
        Target("flatout", "peer", 1.8),
        Target("flatout", "peer", 1.0, 31.0),
        Target("flatout", "peer", 1.0, None, 4),
    )
    for target in missed:
        assert "| missed |" in markdown(results, [target])


def test_the_measured_balance_stands_beside_the_planned_one():
    figures = ((0.99, 1.0, 2.0), (0.97, 3.0, 3.0))
    steps = [dict(zip(("balance", "busy_min_s", "busy_max_s"), values, strict=True)) for values in figures]
    assert balance_of(steps) == pytest.approx({"planned_balance": 0.98, "least_by_most_busy": 0.75, "busy_max_s": 2.5})
    assert balance_of([{"balance": 1.0, "busy_min_s": None, "busy_max_s": None}]) == {}


def test_what_a_rank_said_is_the_reason_and_not_what_torchrun_says_of_it() -> None:
    said = "loading\nerror: rank 0 on host-a, step 1: has been silent for 48 s\nThread 0x7f (most recent call first):\n"
    launcher = "W1122 03:59:14 1 torch/distributed/elastic/multiprocessing/api.py:1012] Sending process 5 SIGTERM\n"
    trace = "Traceback (most recent call last):\n" + "  File torch/distributed/run.py\n" * 200
    words = last_words(said + launcher + trace)
    assert words.startswith("loading")
    assert words.endswith("\nerror: rank 0 on host-a, step 1: has been silent for 48 s")
    assert "torch/distributed" not in words
    assert last_words("one process\nValueError: 3\n") == "one process\nValueError: 3"
