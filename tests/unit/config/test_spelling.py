"""What mends a mistake is one value, and each door spells it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from flatout.config.read import make_config
from flatout.config.spelling import as_data_options, in_python, in_studio, spelled_for
from flatout.errors import (
    DataError,
    Fix,
    FlatoutError,
    PeerLostError,
    PreemptedError,
    ProblemsError,
    UsageError,
    of_kind,
)


@pytest.mark.parametrize(
    ("settings", "command", "python", "studio"),
    [
        ({"batch.layout": "rows"}, "batch.layout=rows", 'batch={"layout": "rows"}', "batch.layout: rows"),
        ({"lora.rank": 8}, "lora.rank=8", "rank=8", "lora.rank: 8"),
        ({"optim.lr": "1e-4"}, "optim.lr=1e-4", "lr=1e-4", "optim.lr: 1e-4"),
        ({"gpus": [0, 1], "device": "cuda"}, "'gpus=[0,1]' device=cuda", 'gpus=[0, 1], device="cuda"',
         "gpus: [0,1], device: cuda"),
        ({"optim.max_grad_norm": None}, "optim.max_grad_norm=null", 'optim={"max_grad_norm": None}',
         "optim.max_grad_norm: null"),
        ({"--restart": True}, "--restart", "restart=True", ""),
        ({"--to": "vllm"}, "--to vllm", 'to="vllm"', ""),
        ({"data.template": "plain"}, "data.template=plain", '{"data": {"template": "plain"}} as the first argument',
         "data.template: plain"),
        ({"base.storage": "nf4", "base.compute": "model"}, "base.storage=nf4 base.compute=model",
         'storage="nf4", base={"compute": "model"}', "base.storage: nf4, base.compute: model"),
    ],
)  # fmt: skip
def test_each_door_spells_a_fix(settings, command, python, studio):
    fix = Fix(settings)
    assert (str(fix), in_python(fix), in_studio(fix)) == (command, python, studio)


def test_a_data_set_is_built_with_options():
    assert as_data_options(Fix({"data.max_tokens": 512})) == "--max-tokens 512"
    assert as_data_options(Fix({"data.keys": {"bad": "masked", "meta": "ignored"}})) == (
        "--key bad=masked --key meta=ignored"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"optim.lr": "1e-4"}, {"name": "yes"}, {"name": "1"}, {"gpus": [0]}, {"optim.max_grad_norm": None},
        {"checkpoint.allow_change": ["optim.lr", "seed"]}, {"eval.fraction": 0.05}, {"batch.shuffle": False},
        {"lora.targets": ["q_proj", "v_proj"]}, {"data.sources": [{"path": "a b.jsonl"}]},
    ],
)  # fmt: skip
def test_what_is_spelled_is_accepted_and_means_the_fix(settings):
    fix, name = Fix(settings), next(iter(settings))
    words = str(fix).strip("'")

    def value_of(config: Any) -> Any:
        for part in name.split("."):
            config = getattr(config, part)
        return config

    typed = value_of(make_config({"model": "m"}, [words]))
    first = {"data": settings[name]} if name == "data" else {}
    nested: dict[str, Any] = {"model": "m", **first}
    section, _, last = name.partition(".")
    nested |= {section: {last: settings[name]}} if last else settings
    assert typed == value_of(make_config(nested))
    assert yaml.safe_load(in_studio(fix).partition(": ")[2]) is not ...


def test_an_error_is_spelled_for_its_door_and_keeps_its_values():
    error = UsageError("rank 0 is too small", [Fix({"lora.rank": 8}, "the default"), Fix({"--restart": True})])
    assert str(error) == "rank 0 is too small\n  try lora.rank=8  # the default\n  try --restart"
    with pytest.raises(UsageError) as caught, spelled_for(in_studio):
        raise error.at("run.yaml")
    assert str(caught.value) == "run.yaml: rank 0 is too small\n  try lora.rank: 8  # the default"
    assert caught.value.fixes == error.fixes
    assert str(error).startswith("rank 0")


def test_an_error_of_another_process_is_made_again():
    """Also of classes that are made of more than a text, and of those that other modules derive."""

    class OwnError(DataError):
        pass

    fixes = [Fix({"lora.rank": 8})]
    made = [PeerLostError("a", 1), PreemptedError("a", 15), ProblemsError("a", ["b"]), OwnError("a"), UsageError("a")]
    for error in made:
        again = of_kind(error.kind, f"rank 1: {error.text}", fixes)
        assert isinstance(error, type(again))
        assert (again.exit_code, list(again.fixes)) == (error.exit_code, fixes)
        assert str(again) == f"rank 1: {error.text}\n  try lora.rank=8"
        assert of_kind(error.exit_code, "a").exit_code == error.exit_code
    assert type(of_kind("ValueError", "a")) is FlatoutError


def test_a_way_out_that_is_no_setting_is_told_after_those_that_are():
    other = Fix({}, "choose another model")
    assert str(UsageError("no", [other])) == "no; choose another model"
    assert str(UsageError("no", [Fix({"method": "lora"}), other])) == "no\n  try method=lora\n  or choose another model"
