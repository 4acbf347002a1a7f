"""`flatout verify` on whole models: five architectures, packed, accumulated and over real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.cli.main import main
from flatout.config.read import dump_config


def run_verify(config: Any, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = folder / "run.yaml"
    path.write_text(dump_config(config))
    code = main(["verify", str(path), *arguments])
    return code, json.loads((config.folder / "verify.json").read_text())


def test_five_families_agree_in_every_cut_and_over_two_ranks(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(tmp_path / "run", lora={"rank": 4, "dropout": 0.1})
    code, report = run_verify(config, tmp_path, "--families", "--ranks", "2")
    rows = {row["case"]: row for row in report["rows"]}
    assert (code, report["passed"]) == (0, True)
    for family in ("", "qwen3: ", "llama: ", "gemma2: ", "mistral: ", "phi3: "):
        alone, packed = rows[f"{family}each sample alone"], rows[f"{family}packed"]
        assert (packed["num_micro_batches"], alone["num_micro_batches"]) == (1, 6)
        assert all(rows[family + name]["num_ranks"] == 2 for name in ("ddp", "zero1", "zero2", "zero3", "fsdp"))
    assert {row["verdict"] for row in report["rows"]} == {"ok"}
    worst = max(row["worst_difference"] for row in report["rows"])
    assert worst < 1e-5, f"worst gradient {worst:.1e}"
    # no row may be its own reference
    assert sum(row["worst_difference"] > 0 for row in report["rows"]) == len(rows)
    assert not list((tmp_path / "run").glob(".verify-*"))


def test_every_strategy_agrees_on_every_number_of_ranks_it_is_for(tiny: Any, tmp_path: Path) -> None:
    """The settings ask for rounded sums, which the exact rows leave out and say so."""
    batch = {"samples_per_step": 12}
    config = tiny.config(tmp_path / "run", method="full", batch=batch, comm={"compress": "bf16"})
    code, report = run_verify(config, tmp_path, "--ranks", "4", "--fp64")
    spread = {(row["case"], row["num_ranks"]): row for row in report["rows"] if row["num_ranks"] > 1}
    strategies = {(name, 4) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")}
    assert set(spread) == {("ddp", 2), ("ddp", 3), *strategies}
    assert code == 0
    assert max(row["worst_difference"] for row in spread.values()) < 1e-10
    assert any("comm.compress" in note for note in report["notes"])


def test_the_runs_own_precision_is_held_to_what_plain_transformers_loses(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(tmp_path / "run", method="full", model={"name": str(tiny.model_dir), "precision": "bf16"})
    code, report = run_verify(config, tmp_path, "--ranks", "1", "--fp64")
    verdicts = {row["case"]: row["verdict"] for row in report["rows"]}
    assert code == 0
    assert verdicts["plain transformers in bfloat16"] == "noise"
    assert verdicts["packed in bfloat16, as the run computes"] == "ok"
    exact = [row["worst_difference"] for row in report["rows"] if "bfloat16" not in row["case"]]
    assert max(exact) < 1e-6


def test_4_bit_weights_are_held_to_the_dense_weights_they_stand_for(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(tmp_path / "run", base={"storage": "nf4"}, lora={"rank": 4, "dora": True})
    code, report = run_verify(config, tmp_path, "--ranks", "1")
    assert (code, len(report["rows"]) > 3) == (0, True)


def test_a_tolerance_below_rounding_fails_with_exit_code_5(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run_verify(tiny.config(tmp_path / "run"), tmp_path, "--ranks", "1", "--tolerance", "1e-12")
    assert (code, report["passed"]) == (5, False)
    assert "do not train with it" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["lora", "full"])
def test_on_gpus_every_row_agrees_and_the_own_precision_too(tiny: Any, tmp_path: Path, method: str) -> None:
    config = tiny.config(
        tmp_path / "run", method=method, device="cuda", model={"name": str(tiny.model_dir), "precision": "auto"}
    )
    code, report = run_verify(config, tmp_path, "--families")
    assert code == 0, [row for row in report["rows"] if row["verdict"] == "FAIL"]
    assert any("as the run computes" in row["case"] for row in report["rows"])


def test_a_lost_process_is_a_failed_row_that_names_it_and_leaves_nobody_behind(tiny: Any, tmp_path: Path) -> None:
    """Ranks find no reference: the first to tell ends the others, wherever they wait."""
    from flatout.train.verify_ranks import RankCase, run_rank_cases

    values = tiny.config(tmp_path / "run").model_dump(mode="json") | {"strategy": "ddp"}
    case = RankCase("ddp", 2, values, 0, str(tmp_path / "nowhere"), 1e-4)
    (row,) = run_rank_cases([case], tmp_path / "ranks")
    assert row.verdict == "FAIL"
    assert row.note.startswith("rank ")
    assert "nowhere/facts.json: the file is missing" in row.note
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(tmp_path / "ranks").encode() in command]
