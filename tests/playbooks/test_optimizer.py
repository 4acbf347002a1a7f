"""The playbook of an optimizer in docs/extending.md, followed in a file outside of the package."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from flatout.checkpoint.optimizer_state import load_optimizer_state, state_sizes
from flatout.config.optim import OPTIMIZERS, OptimConfig, OptimizerTraits
from flatout.config.read import make_config
from flatout.errors import CheckpointError, ProblemsError, UsageError
from flatout.planner.parallel_layout import resolve_layout
from flatout.planner.settings import PlanSettings
from flatout.trainer.run import train

LION = '''
import torch
from flatout import OptimizerTraits

class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675."""

    traits = OptimizerTraits(moments=("exp_avg",), counts_steps=False, unused=("eps",))

    def __init__(self, groups, config):
        super().__init__(groups, {"lr": config.lr, "betas": (config.beta1, config.beta2)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
'''


COPIED = """
import torch
from flatout.config.optim import OPTIMIZERS

class Copied(torch.optim.AdamW):
    traits = OPTIMIZERS["adamw"]

    def __init__(self, groups, config):
        super().__init__(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
"""


@pytest.fixture
def lion(tmp_path):
    (tmp_path / "lion.py").write_text(LION)
    return f"{tmp_path / 'lion.py'}:Lion"


def config_of(tiny: Any, folder: Path, **optim: Any) -> Any:
    sections = {"batch": {"max_steps": 4}, "checkpoint": {"every_steps": 2, "keep": 5}}
    return tiny.config(folder, optim={"lr": 1e-3, **optim}, **sections)


def test_an_optimizer_of_ones_own_trains_and_resumes_to_the_bit(tiny, tmp_path, lion):
    config = config_of(tiny, tmp_path / "run", path=lion)
    train(config)
    whole = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    train(config_of(tiny, tmp_path / "adamw"))
    others = load_file(tmp_path / "adamw" / "final" / "adapter_model.safetensors")
    assert not all(torch.equal(others[name], value) for name, value in whole.items())

    saved = load_file(tmp_path / "run" / "checkpoints" / "step-2" / "optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in saved} == {"exp_avg"}
    for gone in ("final", "checkpoints/step-4"):
        shutil.rmtree(tmp_path / "run" / gone)
    train(config)
    again = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in whole.items())

    # traits copied from an optimizer of flatout's own: the class gets each tensor all the same
    (tmp_path / "copied.py").write_text(COPIED)
    train(config_of(tiny, tmp_path / "copied", path=f"{tmp_path / 'copied.py'}:Copied"))
    copied = load_file(tmp_path / "copied" / "final" / "adapter_model.safetensors")
    torch.testing.assert_close(copied, others)

    # another content of the file is another optimizer
    (tmp_path / "lion.py").write_text(LION.replace(".sign_()", ".sign_().mul_(2)"))
    with pytest.raises(CheckpointError, match="optim"):
        train(config)


def test_moments_of_another_dtype_than_their_weights_are_loaded():
    weight = torch.nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    optimizer, traits = torch.optim.SGD([weight], lr=1.0), OptimizerTraits(("exp_avg",), counts_steps=False)
    saved = {"weight/exp_avg": torch.rand(8, 4)}
    load_optimizer_state(optimizer, {"weight": weight}, saved, traits)
    assert torch.equal(optimizer.state[weight]["exp_avg"], saved["weight/exp_avg"])
    with pytest.raises(CheckpointError, match="bfloat16"):
        load_optimizer_state(optimizer, {"weight": weight}, saved, replace(traits, make="module.make"))


@pytest.mark.parametrize("line", ["super().__init__(groups", "beta1, beta2 = group"])
def test_an_error_of_its_own_code_names_file_and_line(tiny, tmp_path, lion, line):
    (tmp_path / "lion.py").write_text(text := LION.replace(line, f"groups = nothing; {line}"))
    number = text[: text.index("nothing")].count("\n") + 1
    with pytest.raises(UsageError, match=rf"lion\.py:{number}: the optimizer's own code failed with NameError: name"):
        train(config_of(tiny, tmp_path / "run", path=lion))


def test_the_plan_counts_its_state(lion):
    config = make_config({"model": {"name": "m"}, "optim": {"path": lion, "lr": 1e-3}})
    assert len(PlanSettings.of(config).optimizer.moments) == 1
    named = {"weight": torch.nn.Parameter(torch.zeros(8, 4))}
    assert state_sizes(named, config.optim) == [128, 128]


def test_one_that_reads_whole_weights_is_not_sharded(tmp_path, lion):
    def layout(strategy: Any) -> str:
        config = make_config({"model": {"name": "m"}, "optim": {"path": lion}, "strategy": strategy})
        return resolve_layout(PlanSettings.of(config), strategy, num_ranks=2, num_nodes=1, why="").strategy

    assert layout("fsdp") == "fsdp"
    (tmp_path / "lion.py").write_text(LION.replace("OptimizerTraits(", "OptimizerTraits(reads_whole=True, "))
    with pytest.raises(UsageError, match=r"fsdp does not work with optim\.path: .*lion\.py:Lion, whose update reads"):
        layout("fsdp")
    assert layout("ddp") == "ddp"


def test_what_it_does_not_read_or_cannot_do_is_refused(tiny, tmp_path, lion):
    with pytest.raises(UsageError, match="eps"):
        train(config_of(tiny, tmp_path / "run", path=lion, eps=0.1))
    with pytest.raises(UsageError, match="has no such class"):
        train(config_of(tiny, tmp_path / "run", path=lion.replace(":Lion", ":Tiger")))
    (tmp_path / "lion.py").write_text(LION.replace("    traits = ", "    facts = "))
    with pytest.raises(UsageError, match="OptimizerTraits"):
        train(config_of(tiny, tmp_path / "run", path=lion))
    assert not (tmp_path / "run" / "checkpoints").exists()
    # what could not be loaded again ends the run at its first update, not at its first save
    (tmp_path / "lion.py").write_text(LION.replace('"exp_avg"', '"momentum"', 1))
    with pytest.raises(UsageError, match=r"has exp_avg, but its `traits` say momentum"):
        train(config_of(tiny, tmp_path / "odd", path=lion))
    assert not [line for line in (tmp_path / "odd" / "metrics.jsonl").read_text().splitlines() if '"step": 2' in line]
    (tmp_path / "lion.py").write_text(LION)
    sections = {"model": {"name": "m"}, "optim": {"path": lion}}
    with pytest.raises(ProblemsError, match=r"optim\.path"):
        make_config({**sections, "strategy": "deepspeed"})
    with pytest.raises(ProblemsError, match="keep one"):
        make_config({**sections, "optim": {"path": lion, "name": "sgd"}})


def test_every_row_is_whole():
    """A name that the schema has without a row, or a row without an optimizer, is an error here."""
    assert set(get_args(OptimConfig.model_fields["name"].annotation)) == set(OPTIMIZERS)
    for name, traits in OPTIMIZERS.items():
        module, _, function = traits.make.partition(".")
        assert callable(getattr(import_module(f"flatout.optim.{module}"), function)), name
        assert traits.moments
        assert set(traits.unused) <= set(OptimConfig.model_fields)
