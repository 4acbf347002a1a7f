"""Which nominal peak a device's name stands for."""

import pytest

from flatout.planner.devices import nominal_peak


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp8", 1671),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA L40S", "fp8", 733),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 5090", "fp8", 419),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "fp8", 4500),
        ("NVIDIA H200", "fp32", None),
        ("cpu", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peaks_by_name(name, arithmetic, tera):
    peak = nominal_peak(name, arithmetic)
    assert (None if peak is None else peak.flops_per_s / 1e12) == tera
