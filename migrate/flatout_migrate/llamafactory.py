"""Configurations of LLaMA-Factory, with the dataset_info.json that names its data sets."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout import UsageError
from flatout.api.settings import read_json
from flatout_migrate import training_arguments as hf
from flatout_migrate import translation as t
from flatout_migrate.translation import Became, Command, Given, RefusedError, Rule, Translation
from flatout_migrate.trl import template

_TABLE = t.read_table("llamafactory")
# the format of the rows of a stage that compares or judges answers
_JUDGED = {"dpo": "preference", "rm": "preference", "kto": "kto"}
# its loss of pairs -> the kind of objective, and its settings -> the field of the objective and the kinds that have it
_LOSSES: Mapping[str, str] = _TABLE["losses"]
_FIELDS: Mapping[str, tuple[str, str]] = _TABLE["fields"]


def role(given: Given) -> Became:
    """Translate a tag of a role: what it names has this role."""
    return Became({f"roles.{given.value}": _TABLE["roles of tags"][given.name]})


def translate(command: Command, num_gpus: int) -> Translation:
    """Translate a YAML of LLaMA-Factory; relative paths in it are looked up here, then in its folder.

    Raises UsageError for a file that merges or answers, with the command that does it.
    """
    given = command.values
    _require_training(given)
    defaults = {**hf.TRANSFORMERS_DEFAULTS, **t.defaults_of("llamafactory", given)}
    if "lora_rank" in defaults:
        defaults["lora_alpha"] = 2 * int(given.get("lora_rank") or 8)
    data: dict[str, Rule] = t.each("dataset dataset_dir max_samples", lambda it: _sources(it, command.folder))
    table = t.rules_of("llamafactory") | data
    return t.translate(given, table, defaults=defaults, nullable=hf.NULLABLE - {"max_length"}, num_gpus=num_gpus)


def _require_training(given: Mapping[str, Any]) -> None:
    """Raise UsageError for a file of `llamafactory-cli export`, chat, webchat or api."""
    if given.keys() & {"stage", "do_train", "dataset"} or not given.keys() & {"export_dir", "infer_backend"}:
        return
    model, adapter = (str(given.get(name) or "") for name in ("model_name_or_path", "adapter_name_or_path"))
    out = str(given.get("export_dir") or "")
    if out and (not adapter or "," in adapter or given.get("export_quantization_bit")):
        raise UsageError(
            f"export_dir: {out}: no single adapter is merged; `flatout merge` merges one, and `flatout export --to "
            "gguf --quantize` writes 8 bits, with llama.cpp 4"
        )
    step = ["merge", adapter, "--out", out] if out else ["chat", adapter or model]
    command = shlex.join(["flatout", *step])
    raise UsageError(f"a file that {'merges' if out else 'answers'} and trains nothing is a command here: {command}")


def _sources(given: Given, folder: Path) -> Became:
    """Look the names of `dataset` up in dataset_info.json."""
    where = Path(str(given.all.get("dataset_dir", "data")))
    root = next((each for each in (where, folder / where) if (each / "dataset_info.json").is_file()), None)
    if root is None:
        raise RefusedError(f"{where}/dataset_info.json is needed to find the data; copy it, or set dataset_dir")
    try:
        known = read_json(root / "dataset_info.json")
    except UsageError as error:
        raise RefusedError(error.text) from None
    named = given.all.get("dataset", "")
    names = [str(name).strip() for name in (named if isinstance(named, list) else str(named).split(","))]
    if missing := [name for name in names if not isinstance(known.get(name), Mapping)]:
        raise RefusedError(f"{missing[0]!r:.60} is not in {root}/dataset_info.json")
    sources = [_source(known[name], name, root) for name in names]
    if given.all.get("stage") == "pt" and any(source["format"] != "text" for source in sources):
        raise RefusedError("stage: pt needs rows of text; set data.sources")
    for name, source in zip(names, sources, strict=True):
        _check_stage(str(given.all.get("stage")), name, source["format"])
    if given.name != "max_samples":
        return Became({"data.sources": sources})
    limit = int(given.number())
    if len(sources) == 1:
        return Became({"data.num_samples": limit, "data.shuffle": False})
    if any(_num_rows(source["path"]) > limit for source in sources):
        raise RefusedError(
            "it counts each data set, data.num_samples counts all, and a file has more rows or is not here to count: "
            "leave it out, or cut the files"
        )
    return Became(note="no data set has more rows")


def _check_stage(stage: str, name: str, rows: str) -> None:
    """Raise RefusedError for rows that the stage does not take."""
    wanted = _JUDGED.get(stage)
    if wanted and rows != wanted:
        what = "ranking: true" if wanted == "preference" else "a column kto_tag"
        raise RefusedError(f"{name}: stage: {stage} needs data sets with {what}")
    if not wanted and rows in _JUDGED.values():
        needed = "dpo or rm" if rows == "preference" else "kto"
        raise RefusedError(f"{name}: its rows compare or judge answers, for stage: {needed}")


def _num_rows(path: str) -> float:
    """Return the number of rows of a local JSON file; infinity for anything else."""
    try:
        return len(read_json(Path(path)))
    except (UsageError, TypeError):
        return float("inf")


def _source(entry: Mapping[str, Any], name: str, root: Path) -> dict[str, Any]:
    try:
        source = {"format": "alpaca"} | t.inner(entry, t.rules_of("llamafactory/of a data set")).settings
    except RefusedError as reason:
        raise RefusedError(f"{name}: {reason}") from None
    if "file_name" in entry:
        source["path"] = str(root / entry["file_name"])
    if entry.get("ranking"):
        source["format"] = "preference"
    elif "label" in source.get("columns", {}):
        source["format"] = "kto"
    if source["format"] == "alpaca" and set(source.get("columns", ())) == {"instruction"}:
        source |= {"format": "text", "columns": {"text": source["columns"]["instruction"]}}
    return source


def preference(given: Given) -> Became:
    """Translate a setting of stage: dpo or kto, which no other stage reads."""
    stage = given.all.get("stage")
    if stage not in ("dpo", "kto"):
        return Became(note="only stage: dpo and kto read it")
    kind = "kto" if stage == "kto" else _LOSSES.get(str(given.all["pref_loss"]))
    if kind is None:
        raise RefusedError(f"pref_loss: {given.all['pref_loss']!r:.40} is not one of {', '.join(_LOSSES)}")
    if given.name == "pref_loss" and stage == "dpo":
        return Became({"objective.kind": kind})
    field, kinds = _FIELDS.get(given.name, ("", ""))
    if kind not in kinds.split():
        if given.name == "pref_ftx" and given.number():
            raise RefusedError(f"{kind} has no cross-entropy of the good answers beside its loss here; write 0")
        return Became(note=f"{kind} does not read it")
    # ORPO's loss has the chosen answer's cross-entropy of itself
    return Became({f"objective.{field}": given.number() + (field == "sft_weight" and kind == "orpo")})


chat_template = template({"llama3": "llama-3", "chatml": "chatml", "qwen3_nothink": "chatml"})
