"""GRPO of TRL and of Unsloth's notebooks: rounds of rollouts, their rewards and the policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flatout.api.settings import read_json
from flatout_migrate import translation as t
from flatout_migrate.training_arguments import is_hub_id
from flatout_migrate.translation import Became, Given, RefusedError

_TABLE = t.read_table("grpo")
_NO_REWARDS = {name: why for names, why in _TABLE["no rewards"].items() for name in names.split()}
# stands for the file beside the configuration into which functions of a script are copied
COPIED = "COPIED.py:"
AS_TEXT = "a prompt that is a text, no chat, is continued as it is there; set data.template=plain for that here"
_SHUFFLED = "there, answers are shuffled over the steps of a round; here, a step has whole groups"
_SCORED = "as there if its config.json has its tokenizer's padding token; a prompt that is a text has no template there"
_RAISED = "a batch had no whole groups: it has one on each GPU, as Unsloth makes it; TRL refuses it"


def _round(given: Given) -> tuple[dict[str, int], str]:
    """Return the settings of a round, from answers on each GPU; and what of it is different here.

    A step trains batch x accumulation answers, and so many batches as steps_per_generation are sampled at once: where
    these are fewer than those of a step, the weights do not change meanwhile, and the round is that step.
    """
    group, size, accumulated = (
        int(given.number(name, default))
        for name, default in (
            ("num_generations", 8), ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1),
        )
    )  # fmt: skip
    total, sampled = (given.all.get(name) for name in ("generation_batch_size", "steps_per_generation"))
    if total and sampled:
        raise RefusedError("generation_batch_size and steps_per_generation say the same; keep one")
    note = ""
    if not (total or sampled) and size * given.num_gpus * accumulated % group:
        size, note = group, _RAISED
    batch = size * given.num_gpus
    sampled = int(total) / batch if total else int(sampled or accumulated)
    batches = max(sampled, accumulated)
    steps, prompts = batches / accumulated, batch * batches / group
    whole = (steps, batches / sampled, prompts, prompts / steps, batch * sampled / group)
    if not all(float(one).is_integer() for one in whole):
        raise RefusedError(
            f"rounds of {batch * sampled:g} answers, {group} to each prompt, and steps of {batch * accumulated} are no "
            f"whole groups; write per_device_train_batch_size: {group}, and steps_per_generation: {accumulated}"
        )
    note = note or (_SHUFFLED if steps > 1 else "")
    return {"rollout.prompts": int(prompts), "rollout.group": group, "rollout.steps": int(steps)}, note


def _sizes(given: Given) -> Became:
    settings, note = _round(given)
    note = note if given.name == "num_generations" else ""
    return Became(settings, note, check=bool(note))


def length(given: Given) -> Became:
    """Translate max_steps, or the epochs over `num_rows` prompts, unless `rounds` are given."""
    if rounds := given.all.get("rounds"):
        return Became({"rollout.rounds": int(rounds)}, "rollout.rounds is given" if given.name != "rounds" else "")
    (prompts, _, steps), epochs = _round(given)[0].values(), given.number("num_train_epochs", 3)
    if (max_steps := int(given.number("max_steps", -1))) > 0:
        note = f"the run ends with its round of {steps} steps" if max_steps % steps else ""
        return Became({"rollout.rounds": -(-max_steps // steps)}, note, check=bool(note) and given.name == "max_steps")
    if num_rows := given.all.get("num_rows"):
        return Became({"rollout.rounds": max(1, int(epochs * (num_rows // prompts)))})
    rule = f"{epochs:g} x rows of the data / {prompts} prompts of a round"
    raise RefusedError(f"only the data tells the number of rounds; give rollout.rounds=N, {rule}")


def rewards(given: Given) -> Became:
    """Translate rewards: FILE.py:NAME, a dotted name as the command line has it, one of TRL's own, or {model: NAME}.

    The command line has one model besides, which comes first.
    """
    model, named = given.all.get("reward_model_name_or_path"), given.all.get("reward_funcs")
    if model is None and named is None:
        return Became(note="of reward_funcs, which the trainer gets")
    functions = named if isinstance(named, list) else [] if named is None else t.names_of(named)
    names, weights = [{"model": model}] * bool(model) + functions, given.all.get("reward_weights")
    if weights is not None and len(weights) != len(names):
        raise RefusedError(f"{len(weights)} weights of {len(names)} rewards; write one for each")
    rewards = [_model(each["model"], given) if isinstance(each, Mapping) else _reward(str(each)) for each in names]
    for reward, weight in zip(rewards, weights or (), strict=False):
        reward["weight"] = float(weight)
    models = [reward for reward in rewards if reward.get("kind") == "model"]
    for number, reward in enumerate(models[1:], 2):
        reward["name"] = f"model_{number}"
    is_shown = bool(models) and given.name != "reward_weights"
    return Became({"rollout.rewards": rewards}, _SCORED if is_shown else "", check=is_shown)


def _model(name: object, given: Given) -> dict[str, Any]:
    """Return the reward of a model for sequence classification. Raises RefusedError where TRL scores another text."""
    if not isinstance(name, str) or is_hub_id(name):
        raise RefusedError(f"{name!r:.60}: rewards are read from a folder; download it, and write the folder as ./NAME")
    if given.all.get("chat_template_kwargs"):
        raise RefusedError(f"{name}: chat_template_kwargs is read by its template there, and by none here; remove it")
    if _scores_another_token(Path(name).absolute()):
        raise RefusedError(
            f"{name}: the token that ends a chat is padding in its tokenizer, which TRL takes, or in its config.json, "
            "but not in both; give both one pad_token"
        )
    return {"kind": "model", "path": name}


@cache
def _scores_another_token(folder: Path) -> bool:
    """Whether TRL reads the score at another token: it has the tokenizer's padding token, or its eos, as padding."""
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        return False
    from flatout.api.data import load_tokenizer, render  # lazy: most files need no tokenizer

    tokenizer, ours = load_tokenizer(str(folder)), read_json(folder / "config.json").get("pad_token_id")
    chat = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
    theirs = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return ours != theirs and tokenizer.encode(chat, add_special_tokens=False)[-1] in (ours, theirs)


def name_copied(settings: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the rewards of settings, and name the file into which functions are copied."""
    rewards: list[dict[str, Any]] = settings.get("rollout", {}).get("rewards", [])
    for each in (*rewards, *settings.get("data", {}).get("sources", ())):
        for name in {"path", "format"} & each.keys():
            each[name] = each[name].replace(COPIED, f"{file}:")
    return rewards


def is_of_trl(name: str) -> bool:
    """Whether a reward is one that TRL has."""
    return name in _TABLE["rewards"] or name in _NO_REWARDS


def _reward(name: str) -> dict[str, Any]:
    plain = name.removeprefix(COPIED)
    if plain in _TABLE["rewards"]:
        return dict(_TABLE["rewards"][plain])
    if plain in _NO_REWARDS:
        raise RefusedError(f"{plain}: {_NO_REWARDS[plain]}")
    module, dot, function = name.rpartition(".")
    if ".py:" in name:
        return {"path": name}
    if not dot or "/" in name:
        raise RefusedError(f"{name!r:.60} is no function; write one in a file, and name it as MODULE.FUNCTION")
    return {"path": f"{module.replace('.', '/')}.py:{function}"}


def _clip_high(given: Given) -> Became:
    if given.all.get("loss_type") != "cispo":
        return Became({"objective.clip_high": given.number()})
    if given.number() <= 1:
        raise RefusedError("with cispo it is the largest weight, which would be below 1; write 5.0")
    return Became({"objective.clip_high": given.number() - 1}, "1 + clip_high is the largest weight")
