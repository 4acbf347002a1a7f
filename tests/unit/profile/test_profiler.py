"""From kernels to the table: names as recorded on an H200 and by the CPU profiler; then a profiled run."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.profile.profiler import Event, Profiler, break_down, category_of, kernels_of, operators_of, render
from flatout.track.record import RunEnd, StepRecord


def event(name: str, start: float = 0, duration: float = 1, *ranges: str) -> Event:
    return Event(name, start, start + duration, duration, ranges)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
        ("nvjet_qqtst_128x128_128x6_2x1_v_bz_coopA_TNT", "GEMM"),
        ("nvjet_tst_64x16_64x16_1x1_h_bz_TNN", "LoRA"),
        ("nvjet_tst_8x64_64x16_4x1_v_bz_splitK_TNT", "LoRA"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
        ("triton_tem_fused_mm_0", "GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norms, elementwise"),
        ("triton_poi_fused_cat_mul_silu_5", "norms, elementwise"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<MulFunctor>>", "norms, elementwise"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator&)>",
            "copies",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("_dequantize_kernel", "quantize"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel", "other"),
        ("aten::addmm", "GEMM"),
        ("aten::matmul", "GEMM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::copy_", "copies"),
        ("aten::mul", "norms, elementwise"),
    ],
)
def test_categories_by_name(name, category):
    assert category_of(event(name)) == category


def test_our_ranges_tell_what_names_cannot():
    assert category_of(event("nvjet_tst_128x256_64x4", 0, 1, "flatout::head")) == "head"
    assert category_of(event("void at::native::elementwise_kernel", 0, 1, "ProfilerStep#1", "flatout::optimizer")) == (
        "optimizer"
    )
    assert category_of(event("nvjet_tst_128x256_64x4", 0, 1, "somebody's")) == "GEMM"


def test_time_counts_as_busy_once_however_many_streams_run():
    spans = [(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]
    table = break_down([event("mm", a, b - a) for a, b in spans], wall_s=10e-6, num_steps=1, data_wait_s=0)
    assert (table.idle_s, table.overlap_s) == pytest.approx((5e-6, 2e-6))
    assert break_down([], wall_s=1e-6, num_steps=1, data_wait_s=0).idle_s == 1e-6


def test_a_steps_time_adds_up():
    """Two steps in 100 us: 60 us of GEMM, 20 of attention, a copy of 20 us half beside a GEMM; 10 us nothing runs."""
    events = [
        event("nvjet_tst_128x256_64x4", 0, 30),
        event("nvjet_tst_128x256_64x4", 30, 30),
        event("flash_fwd", 60, 20),
        event("Memcpy HtoD", 70, 20),
    ]
    table = break_down(events, wall_s=100e-6, num_steps=2, data_wait_s=1e-6)
    assert [row.category for row in table.rows] == ["GEMM", "attention", "copies"]
    assert [row.step_s for row in table.rows] == pytest.approx([30e-6, 10e-6, 10e-6])
    assert [row.share for row in table.rows] == pytest.approx([0.6, 0.2, 0.2])
    assert [row.num_kernels for row in table.rows] == [1, 0.5, 0.5]
    assert (table.step_s, table.idle_s, table.overlap_s) == pytest.approx((50e-6, 5e-6, 5e-6))
    total = sum(row.step_s for row in table.rows) + table.idle_s - table.overlap_s
    assert total == pytest.approx(table.step_s)
    lines = render(table, usual_step_s=40e-6)
    assert "(0.0 ms before profiling)" in lines[0]
    assert any("GEMM" in line and "60.0%" in line for line in lines)
    assert any("idle" in line and "10.0%" in line for line in lines)


def entry(cat: str, name: str, ts: float, dur: float, tid: Any = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 0}


def test_a_device_trace_gives_kernels_with_their_ranges():
    trace = {
        "traceEvents": [
            entry("kernel", "inside", 12, 2),
            entry("kernel", "before", 0, 5),
            entry("gpu_user_annotation", "flatout::head", 10, 10),
            entry("gpu_user_annotation", "ProfilerStep#3", 0, 100),
            entry("gpu_memcpy", "elsewhere", 12, 2, 20),
            entry("kernel", "after", 20, 1),
            entry("cpu_op", "aten::mm", 0, 50, 99),
            {"ph": "f", "name": "a flow"},
        ]
    }
    events = {one.name: one for one in kernels_of(trace)}
    assert set(events) == {"inside", "before", "elsewhere", "after"}
    assert events["inside"].ranges == ("flatout::head",)
    assert [events[name].ranges for name in ("before", "elsewhere", "after")] == [(), (), ()]
    assert (events["inside"].start_us, events["inside"].end_us, events["inside"].own_us) == (12, 14, 2)


def test_on_the_cpu_each_moment_belongs_to_the_innermost_operator():
    matrix = torch.randn(200, 200)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function("flatout::optimizer"):
            torch.matmul(matrix, matrix)
        matrix.softmax(-1)
    events = {one.name: one for one in operators_of(profile)}
    assert "flatout::optimizer" not in events
    outer, inner = events["aten::matmul"], events["aten::mm"]
    assert outer.start_us <= inner.start_us < inner.end_us <= outer.end_us
    assert outer.own_us == pytest.approx(outer.end_us - outer.start_us - (inner.end_us - inner.start_us), abs=1e-6)
    assert (category_of(outer), category_of(inner)) == ("optimizer", "optimizer")
    assert category_of(events["aten::softmax"]) == "norms, elementwise"
    table = break_down(list(events.values()), wall_s=1, num_steps=1, data_wait_s=0)
    assert table.overlap_s == pytest.approx(0, abs=1e-9)


STEP = StepRecord(
    step=1, num_steps=9, epoch=0.1, loss=2.5, token_accuracy=0.25, lr=1e-4, grad_norm=0.5, num_samples=4,
    num_tokens=100, num_label_tokens=60, num_micro_batches=2, tokens_per_s=1000.0, label_tokens_per_s=600.0,
    step_s=0.1, data_wait_s=0.25, flops_per_s=4e14, mfu=None, padding_avoided=0.4, balance=1.0, peak_memory_bytes=1,
    elapsed_s=0.1,
)  # fmt: skip


def profiled(tmp_path: Path, num_records: int, num_steps: int = 2) -> list[str]:
    said: list[str] = []
    profiler = Profiler(tmp_path, num_steps, said.append)
    weight = torch.randn(64, 64)
    for step in range(1, num_records + 1):
        for _ in range(10):
            weight = (weight @ weight).softmax(-1)
        profiler.on_step(replace(STEP, step=step))
    profiler.on_end(RunEnd("complete", 0, 1.0))
    return said


def test_a_run_is_profiled_after_its_warm_up(tmp_path):
    said = profiled(tmp_path, num_records=9)
    table = json.loads((tmp_path / "profile.json").read_text())
    assert table["num_steps"] == 2
    assert table["data_wait_s"] == 0.25
    rows = {row["category"]: row for row in table["rows"]}
    assert rows["GEMM"]["num_kernels"] >= 10
    assert 0 < rows["GEMM"]["share"] < 1
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        assert any(one["name"] == "aten::mm" for one in json.load(file)["traceEvents"] if "name" in one)
    assert not (tmp_path / "trace.json").exists()
    assert said[0].startswith("2 steps of ")
    assert "(100.0 ms before profiling)" in said[0]


def test_a_run_that_ends_early_tells_what_there_is(tmp_path):
    assert "shorter than the warm-up" in profiled(tmp_path, num_records=1)[0]
    assert "no step was profiled" in profiled(tmp_path, num_records=3)[0]
    assert profiled(tmp_path, num_records=4, num_steps=5)[0].startswith("1 steps of ")


def test_a_training_run_is_profiled_on_request(tiny, tmp_path, capsys):
    from flatout.cli.main import main
    from flatout.config.read import dump_config

    config = tiny.config(tmp_path / "run", batch={"max_steps": 6})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["train", str(tmp_path / "run.yaml"), "--profile", "2"]) == 0
    table = json.loads((tmp_path / "run" / "profile.json").read_text())
    categories = {row["category"] for row in table["rows"]}
    assert table["num_steps"] == 2
    assert {"GEMM", "attention", "head", "optimizer", "norms, elementwise"} <= categories
    assert "profile    2 steps of" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "run.yaml"), "--profile", "0"]) == 2
