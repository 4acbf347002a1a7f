"""Which changes may go on from a checkpoint: every setting classified, every refusal by name, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from flatout.checkpoint.resume_check import OtherRunError, config_changes, fingerprint_changes, refuse_changes
from flatout.config.schema import Config
from flatout.config.table import RESUME_EFFECTS
from flatout.errors import CheckpointError

BASE: dict[str, Any] = {"model": {"name": "m"}}


def dump(**sections: Any) -> dict[str, Any]:
    return Config.model_validate({**BASE, **sections}).model_dump(mode="json")


def keys_of(schema: type[BaseModel], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, field in schema.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys |= keys_of(section, f"{prefix}{name}.")
        else:
            keys.add(prefix + name)
    return keys


def test_every_setting_is_classified_and_nothing_else():
    assert keys_of(Config) == RESUME_EFFECTS.keys()
    assert all(effect in ("numerics", "rounding", "harmless") and why for effect, why in RESUME_EFFECTS.values())


def test_the_walk_over_a_config_meets_exactly_the_classified_keys():
    """A changed value of each key, one at a time, is found under its own name with its own effect."""
    saved = dump()
    for key, (effect, _) in RESUME_EFFECTS.items():
        now = dump()
        *sections, name = key.split(".")
        section = now
        for part in sections:
            section = section[part]
        section[name] = "another value"
        (change,) = config_changes(saved, now)
        assert (change.key, change.effect, change.now) == (key, effect, "another value")


def test_maths_changes_are_refused_by_key_both_values_and_remedy():
    changes = config_changes(dump(), dump(optim={"lr": 1e-4}, lora={"targets": ["q_proj"]}, log_every_steps=5))
    with pytest.raises(OtherRunError) as raised:
        refuse_changes(changes, [])
    message = str(raised.value)
    for part in (
        "optim.lr: 0.0002 in the checkpoint, 0.0001 now",
        'lora.targets: all-linear in the checkpoint, ["q_proj"] now',
    ):
        assert part in message
    assert "log_every_steps" not in message
    assert raised.value.fixes[0].settings == {"checkpoint.allow_change": ["lora.targets", "optim.lr"]}
    assert raised.value.exit_code == 4


def test_allowing_is_by_key_or_section():
    changes = config_changes(dump(), dump(optim={"lr": 1e-4, "beta2": 0.95}))
    refuse_changes(changes, ["optim"])
    refuse_changes(changes, ["optim.lr", "optim.beta2"])
    for allow in (["optim.lr"], ["opt"], ["optim.l"], ["lr", "beta2"]):
        with pytest.raises(CheckpointError, match=r"optim\.beta2: 0\.999 in the checkpoint, 0\.95 now"):
            refuse_changes(changes, allow)


def test_harmless_and_rounding_changes_pass_and_are_told():
    now = dump(
        name="other",
        run_dir="/elsewhere/run",
        log_every_steps=9,
        data={"root": "/elsewhere/data", "num_procs": 3},
        batch={"micro_batch_tokens": 64},
        checkpoint={"every_steps": 7, "keep": 9, "allow_change": ["seed"]},
    )
    changes = config_changes(dump(), now)
    refuse_changes(changes, [])
    assert len(changes) == 9
    told = {change.key: str(change) for change in changes}
    assert told["batch.micro_batch_tokens"] == (
        "batch.micro_batch_tokens: null in the checkpoint, 64 now (the same steps in different micro-batches; "
        "lora.dropout masks change)"
    )
    assert told["run_dir"].startswith("run_dir: null in the checkpoint, /elsewhere/run now")


def test_unknown_keys_are_maths_on_either_side():
    new = dump()
    old = {**new, "optim": {**new["optim"], "warp": 9}, "gone": {"deep": {"x": 1}}}
    changes = config_changes(old, new)
    assert [(change.key, change.saved, change.now) for change in changes] == [
        ("gone.deep.x", 1, "(absent)"),
        ("optim.warp", 9, "(absent)"),
    ]
    with pytest.raises(CheckpointError, match=r"optim\.warp: 9 in the checkpoint, \(absent\) now \(a setting that"):
        refuse_changes(changes, [])
    with pytest.raises(CheckpointError, match=r"optim\.warp: \(absent\) in the checkpoint, 9 now"):
        refuse_changes(config_changes(new, old), ["gone"])


OLD = {"data": {"name": "alpaca", "num_samples": 52002, "fingerprint": "aa11"}, "plan": "p1"}
NEW = {"data": {"name": "alpaca", "num_samples": 51000, "fingerprint": "bb22"}, "plan": "p2"}


def refuse_other(saved: dict[str, Any], now: dict[str, Any], *allow: str, **sections: Any) -> None:
    """Refuse as a start does whose settings differ by `sections`."""
    settings = config_changes(dump(), dump(**sections))
    allow += tuple(change.key for change in settings)
    refuse_changes([*settings, *fingerprint_changes(saved, now, settings)], allow)


def test_other_data_is_refused_with_name_and_rows():
    refuse_other(OLD, dict(OLD))
    with pytest.raises(OtherRunError) as raised:
        refuse_other(OLD, NEW)
    message = str(raised.value)
    assert "data: name alpaca, num_samples 52002, fingerprint aa11 in the checkpoint" in message
    assert "name alpaca, num_samples 51000, fingerprint bb22 now" in message
    # the plan follows from the data
    assert raised.value.fixes[0].settings == {"checkpoint.allow_change": ["data"]}
    refuse_other(OLD, NEW, "data")


def test_all_that_differs_is_named_at_once():
    old, new = ({**OLD, "objective": name, "model": {"config.json": name, "a": name}} for name in ("a", "b"))
    with pytest.raises(OtherRunError, match=r"model: a: a in the checkpoint, b now") as raised:
        refuse_other(old, {**new, "eval_data": "e1"})
    assert r"eval_data: (absent) in the checkpoint, e1 now" in str(raised.value)
    assert raised.value.fixes[0].settings == {"checkpoint.allow_change": ["eval_data", "model", "objective"]}
    refuse_other(old, new, "model", "objective")


def test_a_plan_alone_is_refused_unless_a_named_change_explains_it():
    now = {**OLD, "plan": "p2"}
    with pytest.raises(CheckpointError, match="plan: p1 in the checkpoint, p2 now"):
        refuse_other(OLD, now)
    with pytest.raises(CheckpointError, match="plan: p1"):
        refuse_other(OLD, now, name="other")
    refuse_other(OLD, now, batch={"samples_per_step": 8})
    refuse_other(OLD, now, "plan")
