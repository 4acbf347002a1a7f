"""Turbo-Tune's command lines: what each flag sets, what is refused by name, and a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typed import settings_typed

import flatout
from flatout.data.token_store import TokenStore
from flatout.errors import install
from flatout_migrate.doors import turbo_tune

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "turbo-tune"
# the entries of Turbo-Tune's own files that the example's lack
MISPLACED = {"zero1": {"tensor_parallel": {"autotp_size": 2}}, "zero2": {}, "zero3": {}}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of instruction, input and output, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    lines = [{"instruction": f"Add {n} and", "input": "1" if n % 2 else "", "output": f"{n + 1}"} for n in range(40)]
    file = tmp_path / "math.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def settings_of(tiny: Any, rows: Path) -> Any:
    """The settings that flags become, by dotted name."""
    return lambda *flags: settings_typed(turbo_tune, lambda patch: type_in(patch, tiny, rows, *flags))


def type_in(patch: pytest.MonkeyPatch, tiny: Any, rows: Path, *flags: str) -> int:
    required = ["--model_path", str(tiny.model_dir), "--dataset_path", str(rows)]
    patch.setattr(sys, "argv", ["qwen3_sft.py", *required, *flags])
    return turbo_tune.main()


def test_defaults_are_those_of_the_script(settings_of: Any) -> None:
    found = settings_of()
    expected = {
        "method": "full", "strategy": "auto", "batch.samples_per_step": 128, "batch.max_steps": 100,
        "checkpoint.every_steps": 500, "optim.lr": 2e-5, "optim.weight_decay": 0.1, "optim.name": "adamw",
        "schedule.kind": "cosine", "schedule.warmup_ratio": 0.1, "model.precision": "bf16", "data.max_tokens": 4096,
        "data.loss_type": "all", "data.template": "plain", "log_every_steps": 1, "track.to": [], "deterministic": False,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--global_batch_size 16", {"batch.samples_per_step": 16, "data.too_long": "truncate"}),
        ("--optim adamw_8bit --use_lora", {"optim.name": "adamw8bit", "lora.rank": 8, "lora.alpha": 0.5}),
        ("--use_lora --use_fp8", {"base.storage": "fp8"}),
        ("--use_fp8", {"full.compute": "fp8"}),
        ("--use_liger_efficiency_callback", {"track.to": ["mlflow"]}),
        ("--local_rank=0", {"strategy": "auto"}),
        ("--learning_rate 1e-4 optim.lr=3e-4 device=cpu", {"optim.lr": 3e-4, "device": "cpu"}),
    ],
)  # fmt: skip
def test_each_flag_becomes_a_setting(settings_of: Any, flags: str, expected: dict[str, Any]) -> None:
    """The case `flags` of the manifest sees the other flags in a run."""
    found = settings_of(*flags.split())
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("fsdp", ["full_shard auto_wrap", "full_shard", "shard_grad_op auto_wrap offload"])
def test_fsdp_words_and_fsdp_json(settings_of: Any, fsdp: str) -> None:
    Path("config").mkdir()
    Path("config/fsdp.json").write_text((EXAMPLE / "config" / "fsdp.json").read_text())
    found = settings_of("--fsdp", fsdp)
    assert found["strategy"] == ("zero2" if "grad" in fsdp else "fsdp")
    assert found["sharding.offload"] == ("offload" in fsdp)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_deepspeed_files_as_they_are(settings_of: Any, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((EXAMPLE / "config" / f"{stage}.json").read_text())
    content["zero_optimization"] |= MISPLACED[stage]
    Path("ds.json").write_text(json.dumps(content))
    found = settings_of("--deepspeed_config", "ds.json")
    assert found["strategy"] == "deepspeed"
    assert found["deepspeed.zero_optimization.stage"] == int(stage[-1])
    left_out = {"zero1": "tensor_parallel", "zero3": "stage3_module_granularity_threshold"}.get(stage)
    assert (f"{left_out} is left out: " in capsys.readouterr().out) == (left_out is not None)
    assert left_out not in found["deepspeed.zero_optimization"]


def test_a_packed_row_is_as_many_samples_as_fill_it(settings_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One step has as many tokens as Turbo-Tune's, and samples stay apart."""
    found = settings_of("--use_packing", "--global_batch_size", "2", "--max_length", "64")
    store = TokenStore.open(Path("data/built_dataset/math"))
    tokens = float(store.lengths.mean()) * found["batch.samples_per_step"]
    assert tokens == pytest.approx(2 * 64, rel=0.05)
    assert "2 rows of 64 tokens: each step has" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--use_fast_moe_block", "use_fast_moe_block: flatout has no expert kernels of its own"),
        ("--rank 4", "rank: it has no effect without --use_lora"),
        ("--optim lion_8bit", "optim: 'lion_8bit' is not supported"),
        ("--deepspeed_config ds.json --fsdp full_shard", "sets strategy to"),
        ("--deepspeed_config missing.json", "missing.json"),
        ("--deepspeed_config ds.json --use_fp8", "full.compute: fp8"),
        ("--fsdp tensor_shard", "fsdp: tensor_shard is not supported"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(
    tiny: Any, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, why: str
) -> None:
    Path("ds.json").write_text((EXAMPLE / "config" / "zero3.json").read_text())
    assert type_in(monkeypatch, tiny, rows, *flags.split()) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_an_unknown_flag_is_refused(tiny: Any, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as refused:
        type_in(monkeypatch, tiny, rows, "--use_magic")
    assert refused.value.code == 2


def test_a_run_trains_on_answers_only(
    tiny: Any, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--train_steps 2 --global_batch_size 8 --max_length 64 --completion_only_loss --output_dir out device=cpu"
    assert type_in(monkeypatch, tiny, rows, *flags.split()) == 0
    run = flatout.load("out")
    assert [step.num_samples for step in run.log.steps] == [8, 8]
    assert "complete, 2 of 2 steps" in capsys.readouterr().out
    store = TokenStore.open(Path("data/built_dataset/math"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    token_ids, loss_mask = store.sample(1).pair
    assert tokenizer.decode(token_ids) == f"Add 1 and\n12{tokenizer.eos_token}"
    assert tokenizer.decode(token_ids[loss_mask]) == f"2{tokenizer.eos_token}"
    saved = yaml.safe_load(Path("out/config.yaml").read_text())
    assert saved["data"]["template"] == "plain"


@pytest.mark.parametrize(
    ("script", "installed"),
    [
        ("qwen3_sft.sh", False),
        ("qwen3_sft_multinode.sh", False),
        ("qwen3_sft_multinode.sh", True),
        pytest.param("qwen3_sft.sh", True, marks=pytest.mark.exhaustive),
    ],
)
def test_all_missing_packages_are_said_at_once_before_ranks_start(
    tiny: Any, rows: Path, tmp_path: Path, script: str, installed: bool
) -> None:
    """The script as people run it, with a torchrun that says it was started; packages are stand-ins, or not there."""
    if not installed and (find_spec("mlflow") or find_spec("deepspeed")):
        pytest.skip("the packages are installed here")
    shutil.copytree(EXAMPLE, tmp_path / "here")
    (tmp_path / "bin").mkdir()
    for name, line in {"python": f'exec {sys.executable} "$@"', "torchrun": 'echo started "$@"'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for package in ("mlflow", "deepspeed") if installed else ():
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").touch()
    env = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NUM_GPU": "2", "CKPT_PREFIX": str(tmp_path),
        "MODEL_PATH": str(tiny.model_dir), "DATA_PATH": str(rows), "DS_CONFIG_PATH": "config/zero3.json",
        "MASTER_ADDR": "h", "MASTER_PORT": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [tmp_path / "packages", ROOT, ROOT / "migrate"])),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", script, "--use_packing"], cwd=tmp_path / "here", env=env, capture_output=True, text=True, check=False
    )
    if installed:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("started --")
        assert "--use_packing" in done.stdout
        return
    mlflow = "track.to: mlflow needs the package mlflow and " if script == "qwen3_sft.sh" else ""
    verb, extras = ("are", "mlflow,deepspeed") if mlflow else ("is", "deepspeed")
    said = f"{mlflow}strategy: deepspeed needs the package deepspeed, which {verb} not installed; "
    assert done.stderr == f"error: {said}{install(extras)}\n"
    assert (done.returncode, done.stdout) == (2, "")
