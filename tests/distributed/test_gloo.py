"""Real processes over gloo: N ranks take the same steps, with the same loss and weights, as one."""

import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import DEADLINE_S, wait_for_steps
from model_table import tiny as tiny_config_of
from safetensors.torch import load_file
from spawned_ranks import start_warm_ranks
from transformers import CONFIG_MAPPING
from warm_process import WarmProcess

from flatout.config.read import dump_config
from flatout.trainer.run import train

TRAIN = ("-m", "flatout", "train")


def start(
    config: Any, folder: Path, num_ranks: int, *, last: Any = None, program: Sequence[str] = TRAIN
) -> list[WarmProcess]:
    """So many ranks of a run; the last one of another, if given."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank-{rank}.yaml" for rank in range(num_ranks)]
    for path in paths:
        path.write_text(dump_config(last if last and path == paths[-1] else config))
    return start_warm_ranks(num_ranks, lambda rank: [*program, str(paths[rank])], folder)


def finish(processes: list[WarmProcess]) -> list[int]:
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 75}, outputs
    return codes


@pytest.fixture(scope="module", params=["lora", pytest.param("full", marks=pytest.mark.exhaustive)])
def one_rank(request, tiny, tmp_path_factory):

    root = tmp_path_factory.mktemp("ranks")
    config = tiny.config(
        root / "one",
        method=request.param,
        model={"name": str(tiny.model_dir), "precision": "fp64"},
        # five samples a step: two ranks get uneven shares, and the last step of the epoch is ragged
        batch={"samples_per_step": 7, "micro_batch_tokens": 600, "max_steps": 20},
        eval={"fraction": 0.1, "every_steps": 10},
    )
    train(config)
    return config


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_ranks_equal_one_process(one_rank, tmp_path, metrics_of, num_ranks):
    config = one_rank.model_copy(update={"run_dir": tmp_path / "many"})
    assert finish(start(config, tmp_path, num_ranks)) == [0] * num_ranks
    expected, got = metrics_of(one_rank.folder), metrics_of(tmp_path / "many")
    assert len(expected) == len(got) == 20
    for a, b in zip(expected, got, strict=True):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-10)
        assert (a["num_tokens"], a["num_label_tokens"], a["lr"]) == (b["num_tokens"], b["num_label_tokens"], b["lr"])
        assert len(b["rank_busy_s"]) == b["num_ranks"] == num_ranks
        assert (b["busy_min_s"], b["busy_max_s"]) == (min(b["rank_busy_s"]), max(b["rank_busy_s"]))
        # a record has the ranks' times of the step before
        assert (min(b["rank_busy_s"]) > 0) == (b["step"] > 1)
        assert b["processed_tokens_per_s"] == pytest.approx(b["tokens_per_s"], rel=1e-9)
    evals = [metrics_of(folder, "eval") for folder in (one_rank.folder, tmp_path / "many")]
    for a, b in zip(*evals, strict=True):
        assert b["eval_loss"] == pytest.approx(a["eval_loss"], rel=1e-10)
    weights = [load_file(f / "checkpoints/step-20/model.safetensors") for f in (one_rank.folder, tmp_path / "many")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-9, atol=1e-12)


def test_a_signal_to_one_rank_saves_once_and_stops_all(one_rank, tmp_path, metrics_of):
    """SIGTERM to rank 1 of 2; both exit 75; one rank goes on alone and ends where one process ends."""
    if one_rank.method == "full":
        pytest.skip("the same path for both methods")
    batch = one_rank.batch.model_copy(update={"max_steps": 400})
    config = one_rank.model_copy(update={"run_dir": tmp_path / "many", "batch": batch})
    processes = start(config, tmp_path, 2)
    wait_for_steps(tmp_path / "many", 3)
    processes[1].send_signal(signal.SIGTERM)
    assert finish(processes) == [75, 75]
    saved = [path.name for path in (tmp_path / "many" / "checkpoints").iterdir()]
    assert len(saved) <= 2
    stopped_at = max(int(name.removeprefix("step-")) for name in saved)
    assert stopped_at >= 3
    shorter = batch.model_copy(update={"max_steps": stopped_at + 2})
    allow = config.checkpoint.model_copy(update={"allow_change": ["batch.max_steps"]})
    alone = config.model_copy(update={"batch": shorter, "checkpoint": allow})
    train(alone)
    steps = [record["step"] for record in metrics_of(tmp_path / "many")]
    assert steps == list(range(1, stopped_at + 3))


@pytest.mark.exhaustive
def test_repeated_preemption_ends_bit_equal(tiny, tmp_path):
    """SIGTERM every few steps, in the middle of accumulation; each time exit 75 and at the end the undisturbed bits."""

    settings: dict[str, Any] = {
        "lora": {"rank": 4, "dropout": 0.1},
        "batch": {"samples_per_step": 12, "micro_batch_tokens": 500, "max_steps": 60},
    }
    undisturbed = tiny.config(tmp_path / "undisturbed", **settings)
    train(undisturbed)
    config = undisturbed.model_copy(update={"run_dir": tmp_path / "disturbed"})
    codes = []
    for num_stops in range(2):
        processes = start(config, tmp_path, 1)
        wait_for_steps(tmp_path / "disturbed", 4 + 12 * num_stops)
        processes[0].send_signal(signal.SIGTERM)
        codes += finish(processes)
    codes += finish(start(config, tmp_path, 1))
    assert codes == [75, 75, 0]
    for name in ("model", "optimizer"):
        a, b = (
            load_file(tmp_path / run / "checkpoints" / "step-60" / f"{name}.safetensors")
            for run in ("undisturbed", "disturbed")
        )
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.exhaustive
def test_a_rank_whose_memory_flips_a_bit_is_named_at_the_next_save(tiny, tmp_path):
    config = tiny.config(
        tmp_path / "run", model={"name": str(tiny.model_dir), "precision": "fp64"}, checkpoint={"every_steps": 2}
    )
    processes = start(config, tmp_path, 3, program=[str(Path(__file__).with_name("drifting_ranks.py"))])
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    # one that is slow to leave may hear first that another one has left
    assert 4 in codes, outputs
    assert set(codes) <= {4, 7}, outputs
    assert any("error: replicas have diverged: rank 1 differs in model " in output for output in outputs)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    assert finish(start(config, tmp_path, 1)) == [0]


@pytest.mark.parametrize("what", ["settings", pytest.param("data", marks=pytest.mark.exhaustive)])
def test_ranks_that_mean_other_runs_say_so_and_train_nothing(tiny, tmp_path, what):
    config = tiny.config(tmp_path / "run")
    if what == "settings":
        code, said = 2, "rank 1 on .* has different settings: optim.lr is 0.5, but "
        last = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 0.5})})
    else:
        code, said = 3, "rank 1 on .* has different data from rank 0 on \\S+: its samples, steps.* differ; build"
        fewer = tmp_path / "chats.jsonl"
        fewer.write_text("".join(tiny.chats.read_text().splitlines(keepends=True)[:100]))
        values = config.data.model_dump(mode="json") | {
            "root": str(tmp_path / "data"),
            "sources": [{"path": str(fewer)}],
        }
        last = tiny.config(tmp_path / "run", data=values)
    processes = start(config, tmp_path, 2, last=last)
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [code, code], outputs
    assert all(re.search(said, output) for output in outputs)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


@pytest.mark.exhaustive
# frozen parameters that a strategy would shard, and buffers
@pytest.mark.parametrize(("family", "strategy"), [("laguna", "zero3"), ("deepseek_v3", "ddp")])
def test_biases_of_routers_are_those_of_one_process(tiny, tmp_path, family, strategy):
    changes = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
    shape = {**tiny_config_of(family).to_dict(), "vocab_size": 512, "max_position_embeddings": 2048, **changes}
    CONFIG_MAPPING[family](**shape).save_pretrained(tmp_path / "model")
    config = tiny.config(
        tmp_path / "one",
        method="full",
        model={"name": str(tmp_path / "model"), "init": "random", "precision": "fp64"},
        data={"tokenizer": str(tiny.model_dir)},
        batch={"samples_per_step": 6, "micro_batch_tokens": 520, "max_steps": 4},
        experts={"bias_update": 0.01},
        checkpoint={"every_steps": 2},
    )
    train(config)
    many = config.model_copy(update={"run_dir": tmp_path / "many", "strategy": strategy})
    assert finish(start(many, tmp_path, 2)) == [0, 0]
    # the second half again
    shutil.rmtree(tmp_path / "many/checkpoints/step-4")
    shutil.rmtree(tmp_path / "many/final")
    assert finish(start(many, tmp_path, 2)) == [0, 0]
    one, other = (load_file(tmp_path / name / "final/model.safetensors") for name in ("one", "many"))
    biases = [name for name in one if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert torch.equal(other[name], one[name])
        assert one[name].any()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=1e-9)
