"""A capped GPU reports and allows what a small one would, and what does not fit there is a figure of the bench."""

import json
from types import SimpleNamespace

import pytest
import torch
from bench import cap, inputs
from bench.__main__ import main
from bench.protocol import too_large_batch
from bench.report import markdown, summary
from bench.rows import OURS, Row, Target, choose, sweep

from flatout.errors import UsageError
from flatout.planner.devices import CONTEXT_BYTES, find_device

GIB = 1 << 30
REAL_BYTES = 140 * GIB
CAP_BYTES = cap.total_bytes("24GB")


@pytest.fixture
def large_gpu(monkeypatch):
    """A GPU of 140 GiB with 3 GiB reserved by this process; the share that its allocator is limited to."""
    limits, properties = [], SimpleNamespace(name="A large GPU", major=9, minor=0, total_memory=REAL_BYTES)
    fakes = {
        "set_per_process_memory_fraction": lambda fraction, device: limits.append(fraction),
        "memory_reserved": lambda device: 3 * GIB,
        "mem_get_info": lambda device=None: (100 * GIB, REAL_BYTES),
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.memory, "mem_get_info", fakes["mem_get_info"])
    return limits


def test_a_capped_gpu_has_the_memory_of_the_small_one_that_plans_name(large_gpu):
    cap.apply(CAP_BYTES)
    planned = find_device("24GB").memory_bytes
    assert large_gpu == [pytest.approx(planned / REAL_BYTES)]
    assert torch.cuda.mem_get_info() == (planned - 3 * GIB, planned + CONTEXT_BYTES)
    assert torch.cuda.memory.mem_get_info(0) == torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties()
    assert (properties.total_memory, properties.name) == (CAP_BYTES, "A large GPU")
    assert torch.cuda.get_device_capability() == (9, 0)


def test_without_a_cap_the_gpu_is_as_it_is(large_gpu):
    cap.apply(None)
    assert large_gpu == []
    assert torch.cuda.mem_get_info() == (100 * GIB, REAL_BYTES)


def test_a_sweep_has_the_row_and_each_combination_of_settings():
    rows = sweep(choose(OURS, ["8b-nf4-6gib"]), "recompute=full,none; lora.targets=[q_proj,k_proj]")
    combinations = [f"recompute={level},lora.targets=[q_proj,k_proj]" for level in ("full", "none")]
    assert [row.name for row in rows] == ["8b-nf4-6gib", *(f"8b-nf4-6gib[{text}]" for text in combinations)]
    kept = ["base.storage=nf4", "batch.micro_batch_tokens=2048"]
    assert rows[1].settings["overrides"] == [*kept, "recompute=full", "lora.targets=[q_proj,k_proj]"]
    with pytest.raises(UsageError, match="'recompute' is no setting with values"):
        sweep(rows, "recompute")


def results_of(rates, **header):
    """Results of rows with one run each: its tokens/s, or None if memory was not enough."""
    figures = {
        "label_tokens_per_s": 1.0, "step_p50_s": 1.0, "step_p95_s": 1.0, "peak_allocated_gib": 10.0,
        "peak_reserved_gib": 11.0, "planned_gib": 10.5, "planned_error_percent": 5.0, "recompute": "full",
        "micro_batch_tokens": 4096, "alloc_retries": 3, "cap_share": 0.49,
        "launch_to_first_step_s": 1.0, "losses": [2.0, 1.0],
    }  # fmt: skip
    runs = [
        {"row": name, "repeat": 0, **({**figures, "tokens_per_s": rate} if rate else {})}
        | ({} if rate else {"error": "out of memory: of its log, the end", "out_of_memory": True})
        for name, rate in rates.items()
    ]
    rows = [
        {"name": name, "system": "flatout", "shape": "tiny", "settings": {}, "family": name.partition("[")[0]}
        for name in rates
    ]
    return {
        "header": {"gpu": {"name": "A large GPU"}, "versions": {}, "started": "now", **header},
        "protocol": {"num_steps": 8, "left_out_steps": 3, "order": "A-B-A"},
        "inputs": {}, "rows": rows, "runs": runs,
    }  # fmt: skip


def test_a_report_compares_with_the_best_batch_and_says_what_ran_out_of_memory():
    results = results_of({"ours": 300.0, "peer-1": 100.0, "peer-2": 200.0, "peer-4": None}, cap_gib=23.5)
    targets = [Target("ours", "peer-*", 1.0)]
    for text in (summary(results, targets), markdown(results, targets)):
        assert "ours / peer-2" in text
        assert "1.50x" in text
        assert "out of memory" in next(line for line in text.splitlines() if "peer-4" in line)
        assert "23.5 GiB" in text
        assert "Arithmetic and bandwidth are this GPU's (A large GPU), not a small card's." in text
        assert "49% of the cap, planned 10.5 GiB (+5.0% of the peak), recompute full, micro-batches of 4,096" in text
        assert "the allocator freed its cache 3 times" in text


def test_a_report_says_how_good_auto_is_beside_the_best_of_a_sweep():
    results = results_of({"ours": 90.0, "ours[a=1]": 100.0, "ours[a=2]": 80.0, "ours[a=3]": None})
    assert "ours: auto is 90% of the best, ours[a=1]" in summary(results)
    assert "small card" not in summary(results)


def test_a_run_out_of_memory_is_a_figure_and_no_larger_batch_is_tried(tmp_path, capsys):
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "peer.py").write_text("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory.')")
    row = {"name": "peer", "system": "trl", "shape": "tiny", "batches": [2, 4], "settings": {"load": "bf16"}}
    (peers / "rows.json").write_text(json.dumps({"trainer": "peer.py", "rows": [row]}))
    model_dir = tmp_path / "out" / "work" / "tiny" / "model"
    inputs.write_weightless_model("tiny", model_dir)
    (model_dir / "model.safetensors").touch()
    asked = ["--peers", str(peers), "--out", str(tmp_path / "out"), "--steps", "4", "--repeats", "1"]
    assert main([*asked, "--rows", "peer-*"]) == 1
    printed = capsys.readouterr().out
    assert "peer-2 #1: out of memory after" in printed
    assert "not run: out of memory with a batch of 2" in printed
    assert "| peer-4 | trl | out of memory |" in (tmp_path / "out" / "results.md").read_text()


def test_a_batch_is_not_left_out_for_another_familys():
    rows = [Row("a-2", "trl", "tiny", {"batch": 2}, family="a"), Row("b-4", "trl", "tiny", {"batch": 4}, family="b")]
    failed = [{"row": "a-2", "repeat": 0, "out_of_memory": True}]
    assert too_large_batch(rows[1], rows, failed) is None
    assert too_large_batch(Row("a-4", "trl", "tiny", {"batch": 4}, family="a"), rows, failed) == 2
