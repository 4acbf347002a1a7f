"""Losses of 20 steps on the tiny model, recorded once: a change that claims to keep the maths keeps every bit of them.

`python -m pytest tests/golden --record-golden` writes losses.json anew; say in the commit why they had to change.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.trainer.run import train

RECORDED = Path(__file__).with_name("losses.json")
CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"schedule": {"kind": "cosine", "warmup_steps": 3}, "optim": {"lr": 1e-3, "weight_decay": 0.1}},
    "full_adamw8bit": {
        "method": "full",
        "optim": {"lr": 1e-3, "name": "adamw8bit", "max_grad_norm": 0.5},
        "recompute": "full",
    },
    "dora_nf4_dropout": {
        "lora": {"rank": 4, "dora": True, "dropout": 0.2},
        "base": {"storage": "nf4"},
        "schedule": {"kind": "wsd"},
    },
}


def this_machine() -> dict[str, str]:
    """What the bits of a CPU's sums depend on: math libraries choose a kernel by the processor's model and features."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        names = ("vendor_id", "cpu family", "model", "stepping", "flags")
        digest = hashlib.sha256("".join(facts.get(name, "") for name in names).encode()).hexdigest()[:16]
        processor = f"{platform.machine()} {digest}"
    cpu = f"{processor} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "cpu": cpu, "threads": str(torch.get_num_threads())}


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradient_norms_are_those_recorded(name, tiny, tmp_path, metrics_of, request):
    sections = {"batch": {"max_steps": 20}, "eval": {"fraction": 0.1, "every_steps": 10}, **CONFIGS[name]}
    train(tiny.config(tmp_path / name, **sections))
    found = {
        "loss": [line["loss"].hex() for line in metrics_of(tmp_path / name)],
        "grad_norm": [line["grad_norm"].hex() for line in metrics_of(tmp_path / name)],
        "eval_loss": [line["eval_loss"].hex() for line in metrics_of(tmp_path / name, "eval")],
    }
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"runs": {}}
    if request.config.getoption("--record-golden"):
        recorded = {"machine": this_machine(), "runs": {**recorded["runs"], name: found}}
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
        return
    expected = recorded["runs"][name]
    if this_machine() == recorded["machine"]:
        assert found == expected
        return
    for what, values in expected.items():
        wanted = [float.fromhex(value) for value in values]
        # another CPU or torch adds in another order
        assert [float.fromhex(value) for value in found[what]] == pytest.approx(wanted, rel=1e-4)
