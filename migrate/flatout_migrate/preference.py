"""Preference training of TRL and Axolotl: which objective a loss of theirs is, and which rows it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flatout import UsageError
from flatout_migrate import translation as t
from flatout_migrate.training_arguments import TRANSFORMERS_DEFAULTS
from flatout_migrate.translation import Became, Given, RefusedError, Rule

_TABLE = t.read_table("preference")
# TRL's trainer -> its losses, and the kind of objective that each is; the first is the default
LOSSES: Mapping[str, Mapping[str, str]] = _TABLE["losses"]
# a name of TRL -> the field of the objective, and the kinds that read it; others are refused if they read it there
_FIELDS: Mapping[str, tuple[str, str]] = _TABLE["fields"]
# kinds whose loss there has label smoothing, which flatout's has not
_SMOOTHED = ("cpo", "simpo")
_OLD_SMOOTHING = "conservative DPO, as in TRL before its release 1.0; later ones read it with loss_type: robust only"
_ORPO = "there, the chosen answer's cross-entropy is over its prompt too; here over the answer alone"
_MARGIN = "there, rows with a margin have it in the loss; set objective.margin for that"
_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "nll", "kl")
SYSTEMS = tuple(f"trl-{method}" for method in (*LOSSES, "grpo"))


def defaults_of(method: str, given: Mapping[str, Any], *, is_unsloth: bool = False) -> dict[str, Any]:
    """Return what TRL's trainer of this method does without being told, where flatout's default differs."""
    if method == "grpo":
        of_unsloth = t.defaults_of("grpo", given, "defaults of Unsloth") if is_unsloth else {}
        return {**TRANSFORMERS_DEFAULTS, **t.defaults_of("grpo", given), **of_unsloth}
    first, *_ = LOSSES[method]
    known = {"method": method, "loss_type": given.get("loss_type", first)}
    return {**TRANSFORMERS_DEFAULTS, "max_length": 1024, "loss_type": first, **t.defaults_of("preference", known)}


def rules_of_method(method: str, loss: str = "") -> dict[str, Rule]:
    """Return the rules for the names of a trainer's loss, besides those of TrainingArguments; `loss` is a fixed one."""
    if method == "grpo":
        return t.rules_of("grpo")
    rules = {name: _field(method, name, loss) for name in _FIELDS}
    return {
        **t.rules_of("preference"),
        **rules,
        **t.each("loss_type loss_weights", lambda given: _loss(method, given, loss)),
    }


def method_of(given: Mapping[str, Any]) -> str:
    """Return the trainer that a file's names tell, "" for supervised training. Raises UsageError for several."""
    losses = given.get("loss_type")
    named = {str(name) for name in (losses if isinstance(losses, list) else [losses])}
    method = next((name for name, marks in _TABLE["marks"].items() if {*marks.split()} & given.keys()), "")
    method = method or ("dpo" if named & LOSSES["dpo"].keys() else "kto" if "kto" in named else "")
    if not method and "beta" in given:
        raise UsageError(f"beta is read by several trainers of TRL; name yours by --from {'|'.join(SYSTEMS)}")
    return method


_ROLLOUTS = {*_TABLE["rollouts"].split()}
# translated of TRL and Unsloth alone
GRPO = ("grpo", "dr_grpo", "gspo", "dapo")


def refuse_rollouts(where: str, *names: object, also: Sequence[str] = ()) -> None:
    """Raise UsageError if a name, one of `also` too, is that of training on answers that the model writes meanwhile."""
    for name in names:
        plain = re.sub("(config|trainer)$", "", str(name).lower())
        if {plain, plain.replace("dpo", "_dpo")} & {*_ROLLOUTS, *also}:
            raise UsageError(
                f"{where}: {name}: this trains on answers that the model writes meanwhile (rollouts), which flatout "
                "does not translate but for GRPO of TRL and Unsloth; its own losses: docs/policy-losses.md"
            )


def row_format(method: str) -> str:
    """Return the format of the rows of a trainer."""
    return {"kto": "kto", "grpo": "prompts"}.get(method, "preference")


def _parts(method: str, given: Given, loss: str) -> tuple[str, str, dict[str, float]]:
    """Return the kind of the one loss that is no SFT term, its name, and the weights of all.

    Raises RefusedError for another mixture.
    """
    value = loss or given.all.get("loss_type") or next(iter(LOSSES[method]))
    names = [str(name) for name in value] if isinstance(value, list | tuple) else [str(value)]
    given_weights = given.all.get("loss_weights") or [1.0] * len(names)
    weights = dict(zip(names, map(float, given_weights), strict=True))
    main = [name for name in names if name != "sft"]
    if len(main) != 1 or main[0] not in LOSSES[method]:
        raise RefusedError(f"{value!r:.60} is not one of {', '.join(LOSSES[method])}, with or without sft beside it")
    if weights[main[0]] != 1:
        raise RefusedError(f"the weight of {main[0]} is {weights[main[0]]:g}; write 1, and scale the learning rate")
    return LOSSES[method][main[0]], main[0], weights


def _loss(method: str, given: Given, loss: str) -> Became:
    kind, name, weights = _parts(method, given, loss)
    settings: dict[str, Any] = {"objective.kind": kind, "data.too_long": "drop"}
    # robust without a share of wrong labels is DPO
    if name == "robust" and given.number("label_smoothing", 0):
        settings["objective.robust"] = True
    if "sft" in weights:
        settings["objective.sft_weight"] = weights["sft"]
    note = {"orpo": _ORPO, "reward": _MARGIN}.get(kind, "")
    return Became(settings, note, check=bool(note))


def _field(method: str, name: str, loss: str) -> Rule:
    field, kinds = _FIELDS[name]

    def rule(given: Given) -> Became:
        (kind, main, _), value = _parts(method, given, loss), given.number()
        if kind in kinds.split():
            if name == "label_smoothing":
                is_old = main == "sigmoid" and bool(value)
                return Became({"objective.label_smoothing": value}, _OLD_SMOOTHING if is_old else "", check=is_old)
            return Became({f"objective.{field}": value})
        if name == "label_smoothing" and kind in _SMOOTHED and value:
            raise RefusedError(f"{kind} is without label smoothing here; write 0")
        return Became(note=f"{kind} does not read it")

    return rule


def _best(given: Given) -> Became:
    name = str(given.value).removeprefix("eval_")
    if name in _METRICS:
        return Became({"eval.best": name})
    return t.rules_of("training_arguments")["metric_for_best_model"](given)


# Axolotl's rl -> TRL's trainer and its loss
RL: Mapping[str, tuple[str, str]] = _TABLE["axolotl"]
