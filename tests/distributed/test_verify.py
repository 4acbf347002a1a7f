"""`flatout verify` on whole models: several architectures, packed, accumulated and over real processes."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from flatout.cli.main import main
from flatout.config.read import dump_config


def run_verify(config: Any, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = folder / "run.yaml"
    path.write_text(dump_config(config))
    code = main(["verify", str(path), *arguments])
    return code, json.loads((config.folder / "verify.json").read_text())


def wide_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows in fp64: not those in the run's own precision, of which the share of adapters is one."""
    return [row for row in report["rows"] if "float32" not in row["case"] and row["share"] is None]


# what sets each apart: none of it, soft caps and windows, a window, one linear layer for several
ARCHS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "phi3": {},
}
SHAPE = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


# one of each kind of attention on every change, the others with -m exhaustive
@pytest.mark.parametrize(
    "arch", ["own", *(pytest.param(arch, marks=[] if arch == "gemma2" else pytest.mark.exhaustive) for arch in ARCHS)]
)
def test_every_cut_agrees(tiny, tmp_path, capsys, arch):
    """The run's own model (qwen3) over two ranks, and other architectures of random weights."""
    model = {"name": str(tiny.model_dir), "precision": "fp32"}
    if arch != "own":
        CONFIG_MAPPING[arch](**SHAPE, **ARCHS[arch]).save_pretrained(tmp_path / "model")
        model |= {"name": str(tmp_path / "model"), "init": "random"}
    data: dict[str, Any] = {"tokenizer": str(tiny.model_dir)}
    lora: dict[str, Any] = {"rank": 4, "dropout": 0.1}
    if arch == "own":
        # rows of tied embeddings, and a module, beside LoRA
        data |= {"root": str(tmp_path / "data"), "new_tokens": ["<tool>", "?"]}
        lora |= {"modules_to_save": ["model.norm"], "rank_pattern": {"q_proj": 2}}
    config = tiny.config(tmp_path / "run", model=model, data=data, lora=lora)
    code, report = run_verify(config, tmp_path, "--ranks", "2" if arch == "own" else "1")
    rows = {row["case"]: row for row in report["rows"]}
    assert (code, report["passed"]) == (0, True)
    assert (rows["packed"]["num_micro_batches"], rows["each sample alone"]["num_micro_batches"]) == (1, 6)
    strategies = {case for case, row in rows.items() if row["num_ranks"] == 2}
    every = {"ddp", "zero1", "zero2", "zero3", "fsdp", "ddp, context.parallel 2"}
    assert strategies == (every if arch == "own" else set())
    assert {row["verdict"] for row in report["rows"]} == {"ok"}
    worst = max(row["worst_difference"] for row in report["rows"])
    assert worst < 1e-5, f"worst gradient {worst:.1e}"
    # no row may be its own reference
    assert sum(row["worst_difference"] > 0 for row in report["rows"]) == len(rows)
    assert not list((tmp_path / "run").glob(".verify-*"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and "written to" not in line] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", [{}, {"storage": "nf4"}])
@pytest.mark.parametrize("lora", [{"modules_to_save": ["lm_head", "down_proj"]}, {"modules_to_save": ["embed_tokens"]}])
@pytest.mark.parametrize("tied", [True, False])
def test_modules_trained_in_full_agree_on_every_strategy(tiny, tmp_path, base, lora, tied):
    CONFIG_MAPPING["llama"](**SHAPE, tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "init": "random"}
    data = {"tokenizer": str(tiny.model_dir), "root": str(tmp_path / "data"), "new_tokens": ["<tool>"]}
    config = tiny.config(tmp_path / "run", model=model, data=data, lora={"rank": 4, **lora}, base=base)
    code, report = run_verify(config, tmp_path, "--ranks", "2")
    assert (code, report["passed"]) == (0, True), report


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2}


@pytest.mark.exhaustive
def test_adapters_of_experts_agree_with_peft_on_every_strategy(tiny, tmp_path):
    CONFIG_MAPPING["qwen3_moe"](**{**SHAPE, **EXPERTS}).save_pretrained(tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "init": "random"}
    lora = {"rank": 4, "targets": ["all-linear", "experts"]}
    config = tiny.config(tmp_path / "run", model=model, data={"tokenizer": str(tiny.model_dir)}, lora=lora)
    code, report = run_verify(config, tmp_path, "--ranks", "2", "--fp64")
    strategies = {row["case"] for row in report["rows"] if row["num_ranks"] == 2}
    assert (code, strategies) == (0, {"ddp", "zero1", "zero2", "zero3", "fsdp", "ddp, context.parallel 2"})
    assert max(row["worst_difference"] for row in wide_rows(report)) < 1e-12


@pytest.mark.exhaustive
def test_rope_by_length_agrees_packed_and_on_two_ranks(tiny, length_scaled, tmp_path):
    config = tiny.config(tmp_path / "run", model={"name": str(length_scaled)})
    code, report = run_verify(config, tmp_path, "--ranks", "2", "--fp64")
    rows = {(row["case"], row["num_ranks"]): row["worst_difference"] for row in wide_rows(report)}
    assert (code, report["passed"]) == (0, True)
    assert ("packed", 1) in rows
    assert ("ddp", 2) in rows
    assert max(rows.values()) < 1e-13


@pytest.mark.exhaustive
def test_every_strategy_agrees_on_every_number_of_ranks_it_is_for(tiny, tmp_path):
    """The settings ask for rounded sums, which the exact rows leave out and say so."""
    batch = {"samples_per_step": 12}
    config = tiny.config(tmp_path / "run", method="full", batch=batch, comm={"compress": "bf16"})
    code, report = run_verify(config, tmp_path, "--ranks", "4", "--fp64")
    parallel_layout = {(row["case"], row["num_ranks"]): row for row in report["rows"] if row["num_ranks"] > 1}
    strategies = {(name, 4) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "ddp, context.parallel 2")}
    assert set(parallel_layout) == {("ddp", 2), ("ddp", 3), *strategies}
    assert code == 0
    assert max(row["worst_difference"] for row in parallel_layout.values()) < 1e-10
    assert any("comm.compress" in note for note in report["notes"])


def test_the_runs_own_precision_is_held_to_what_plain_transformers_loses(tiny, tmp_path):
    config = tiny.config(tmp_path / "run", method="full", model={"name": str(tiny.model_dir), "precision": "bf16"})
    code, report = run_verify(config, tmp_path, "--ranks", "1", "--fp64")
    verdicts = {row["case"]: row["verdict"] for row in report["rows"]}
    assert code == 0
    assert verdicts["plain transformers in bfloat16"] == "noise"
    assert verdicts["packed in bfloat16, as in the run"] == "ok"
    exact = [row["worst_difference"] for row in report["rows"] if "bfloat16" not in row["case"]]
    assert max(exact) < 1e-6


def test_4_bit_weights_are_held_to_the_dense_weights_they_stand_for(tiny, tmp_path):
    config = tiny.config(tmp_path / "run", base={"storage": "nf4"}, lora={"rank": 4, "dora": True})
    code, report = run_verify(config, tmp_path, "--ranks", "1")
    assert (code, len(report["rows"]) > 3) == (0, True)


def test_a_tolerance_below_rounding_fails_with_exit_code_5(tiny, tmp_path, capsys):
    code, report = run_verify(tiny.config(tmp_path / "run"), tmp_path, "--ranks", "1", "--tolerance", "1e-12")
    assert (code, report["passed"]) == (5, False)
    told = capsys.readouterr()
    assert "do not train with them" in told.err
    assert "limit 1e-12; worst gradient: model.layers" in told.out
    assert max(map(len, told.out.replace(str(tmp_path), "").splitlines())) <= 80


@pytest.mark.exhaustive
def test_a_signal_leaves_no_process_and_no_folder_behind(tiny, tmp_path):
    """SIGTERM while the ranks compare: nobody waits for them any more."""
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run")))
    words = ["-m", "flatout", "verify", str(tmp_path / "run.yaml"), "--ranks", "2"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ranks() -> list[str]:
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if "flatout.verifier.ranks" in line and str(tmp_path) in line]

    while len(ranks()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert not ranks()
    assert not list((tmp_path / "run").glob(".verify-*"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["lora", "full"])
def test_on_gpus_every_row_agrees_and_the_own_precision_too(tiny, tmp_path, method):
    config = tiny.config(
        tmp_path / "run", method=method, device="cuda", model={"name": str(tiny.model_dir), "precision": "auto"}
    )
    code, report = run_verify(config, tmp_path)
    assert code == 0, [row for row in report["rows"] if row["verdict"] == "FAIL"]
    assert any("as in the run" in row["case"] for row in report["rows"])


def test_a_lost_process_is_a_failed_row_that_names_it_and_leaves_nobody_behind(tiny, tmp_path):
    """Ranks find no reference: the first to tell ends the others, wherever they wait."""
    from flatout.verifier.ranks import RankCase, run_rank_cases

    values = tiny.config(tmp_path / "run").model_dump(mode="json") | {"strategy": "ddp"}
    case = RankCase("ddp", 2, values, 0, str(tmp_path / "nowhere"), 1e-4)
    (row,) = run_rank_cases([case], tmp_path / "ranks")
    assert row.verdict == "FAIL"
    assert row.note.startswith("rank ")
    assert "nowhere/facts.json: the file is missing" in row.note
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(tmp_path / "ranks").encode() in command]


def test_a_traceback_of_a_rank_is_told_without_the_prefixes_that_torch_adds(tiny, tmp_path):
    from flatout.verifier.ranks import RankCase, run_rank_cases

    values = tiny.config(tmp_path / "run").model_dump(mode="json") | {"strategy": "ddp"}
    no_path: Any = None
    (row,) = run_rank_cases([RankCase("ddp", 1, values, 0, no_path, 1e-4)], tmp_path / "ranks")
    assert re.match(r"rank \d ended: TypeError: ", row.note), row.note
