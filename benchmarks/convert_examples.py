"""What becomes of public example configurations: each is converted; each translated one is planned and trains 2 steps.

    python benchmarks/convert_examples.py FOLDER --out benchmarks/results/convert-examples.json

FOLDER holds `axolotl/`, `llama-factory/` and `trl/`, each with a folder per repository, and `origins.json`: a mapping
from path to {repository, path, commit}. A translation is compared with a second reading of the file (`expected`): every
number that is found there has to be in the YAML. To train on a CPU, the model and the rows are replaced by tiny ones;
the rows have the format and the columns that the translation names.

A second try leaves out the names of `LEFT_OUT`, as a user would with --without: uploads, settings of wandb, a template
that flatout has not (the tokenizer's own is used), and the size of a split in rows (a share is held out).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from flatout.cli.main import main as flatout
from flatout.demo.conversations import sample_conversations
from flatout.demo.settings import MODEL_DIR
from flatout.demo.write import write_demo

LEFT_OUT = (
    "push_to_hub", "hub_model_id", "wandb_entity", "chat_template", "template", "dataset_mixture.test_split_size",
)  # fmt: skip
MAX_RANK = 64  # of the tiny model's layers
# setting -> names of the same number; the first that is given counts
_NUMBERS = {
    "optim.lr": ("learning_rate",), "batch.epochs": ("num_epochs", "num_train_epochs"),
    "data.max_tokens": ("sequence_len", "cutoff_len", "max_length", "max_seq_length"), "seed": ("seed",),
    "lora.rank": ("lora_r", "lora_rank"), "lora.alpha": ("lora_alpha",), "lora.dropout": ("lora_dropout",),
    "optim.weight_decay": ("weight_decay",), "schedule.warmup_ratio": ("warmup_ratio",),
    "checkpoint.every_steps": ("save_steps",), "optim.beta2": ("adam_beta2",), "eval.fraction": ("val_set_size",),
    "model.name": ("base_model", "model_name_or_path"), "optim.max_grad_norm": ("max_grad_norm",),
}  # fmt: skip


def expected(given: dict[str, Any]) -> dict[str, Any]:
    """Read the numbers of a configuration without the translation: setting -> value."""
    found = {
        setting: next(given[name] for name in names if given.get(name) is not None)
        for setting, names in _NUMBERS.items()
        if any(given.get(name) is not None for name in names)
    }
    is_lora = (
        given.get("adapter") in ("lora", "qlora") or given.get("use_peft") or given.get("finetuning_type") == "lora"
    )
    if not is_lora:
        found = {name: value for name, value in found.items() if not name.startswith("lora.")}
    if given.get("save_strategy") in ("no", "epoch", "best"):
        found.pop("checkpoint.every_steps", None)
    if given.get("warmup_steps"):
        found.pop("schedule.warmup_ratio", None)
    each = given.get("micro_batch_size") or given.get("per_device_train_batch_size")
    if each and not given.get("batch_size"):
        found["batch.samples_per_step"] = each * (given.get("gradient_accumulation_steps") or 1)
    return found


def value_at(settings: dict[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def differences(settings: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return what is in the original and not in the translation."""
    wrong = []
    for name, value in wanted.items():
        ours = value_at(settings, name)
        # a value that equals flatout's default may be missing; 0 rows held out and no clipping are null
        same = str(ours) == str(value) or (ours is None and value in (0, 0.0))
        with contextlib.suppress(TypeError, ValueError):
            same = same or float(ours) == float(value)
        if not same:
            wrong.append(f"{name}: {ours!r}, but the file says {value!r}")
    return wrong


def call(*words: str) -> tuple[int, str]:
    """Run one verb in this process; return its exit code and error output."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = flatout(list(words))
    return code, errors.getvalue()


def rows_of(source: dict[str, Any], chats: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """Make rows in a source's format, with the columns and roles that it names."""
    columns, kind = source.get("columns", {}), source.get("format", "auto")
    roles = {ours: theirs for theirs, ours in source.get("roles", {}).items()}

    def name(ours: str) -> str:
        return str(columns.get(ours, ours))

    def turns(role: str, content: str) -> list[list[dict[str, str]]]:
        named = {"user": "human", "assistant": "gpt"} if role == "from" else {}
        return [
            [
                {name(role): roles.get(m["role"], named.get(m["role"], m["role"])), name(content): m["content"]}
                for m in chat
            ]
            for chat in chats
        ]

    if kind == "sharegpt":
        key = columns.get("messages", "conversations")
        return [{key: chat} for chat in turns("from", "value")]
    if kind == "alpaca":
        pairs = [(chat[-2]["content"], chat[-1]["content"]) for chat in chats]
        return [{name("instruction"): ask, name("input"): "", name("output"): answer} for ask, answer in pairs]
    if kind == "text" or "text" in columns:
        return [{name("text"): "\n".join(m["content"] for m in chat)} for chat in chats]
    if kind == "segments":
        return [
            {"segments": [{"label": m["role"] == "assistant", "text": m["content"]} for m in chat]} for chat in chats
        ]
    return [{name("messages"): chat} for chat in turns("role", "content")]


def made_tiny(
    settings: dict[str, Any], folder: Path, model: Path, sources: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return settings that train the tiny model on a CPU, and what was replaced for it."""
    values = {**settings, "run_dir": str(folder / "run"), "device": "cpu", "track": {}}
    values["model"] = {**settings["model"], "name": str(model), "init": "random", "revision": None}
    values["data"] = {**settings["data"], "sources": sources, "root": str(folder / "data")}
    values["data"] |= {"tokenizer": None, "num_samples": None}
    replaced = ["model", "rows"]
    if "lora" in settings:
        values["lora"] = {**settings["lora"], "targets": "all-linear"}
        replaced.append("lora.targets, which name modules of the original's model")
        values["lora"]["rank"] = min(settings["lora"].get("rank", MAX_RANK), MAX_RANK)
    if "strategy" in settings:
        values.update(strategy="auto", deepspeed=None, sharding={})
        replaced.append(f"strategy: {settings['strategy']}, which needs several GPUs")
    for name, value in (("model.precision", "fp16"), ("base.storage", "fp8"), ("full.weights", "bf16")):
        section, _, key = name.partition(".")
        if value_at(settings, name) == value:
            values[section] = {other: kept for other, kept in values[section].items() if other != key}
            replaced.append(f"{name}: {value}, which needs a GPU")
    return values, replaced


def train(settings: dict[str, Any], folder: Path, model: Path, chats: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Plan and train 2 steps with the tiny model and rows; return what was replaced, the steps taken, or the error."""
    sources = []
    for index, source in enumerate(settings["data"].get("sources", [])):
        path = folder / f"rows-{index}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(source, chats)))
        kept = {key: source[key] for key in ("format", "columns", "roles", "weight") if key in source}
        sources.append({"path": str(path), **kept})
    values, replaced = made_tiny(settings, folder, model, sources)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    steps = ["batch.max_steps=2", "batch.samples_per_step=4", "batch.micro_batch_tokens=4096"]
    if (settings.get("eval") or {}).get("fraction"):
        steps.append("eval.prompts=[]")
    for verb in ("plan", "train"):
        code, errors = call(verb, str(config), *steps)
        if code:
            return {"replaced": replaced, "steps": 0, "error": f"{verb}: {errors.strip()[-400:]}"}
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    taken = [record for record in records if record["kind"] == "step"]
    return {"replaced": replaced, "steps": max(record["step"] for record in taken), "loss": taken[-1]["loss"]}


def convert(path: Path, top: Path, out: Path, *words: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Convert from the repository's folder, as its users do; return the settings, or the reasons of the refusal."""
    for file in (out, out.with_suffix(".jinja")):
        file.unlink(missing_ok=True)
    before = Path.cwd()
    os.chdir(top)
    try:
        code, errors = call("convert", str(path.relative_to(top)), "--to", str(out), *words)
    finally:
        os.chdir(before)
    if code == 0:
        return yaml.safe_load(out.read_text()), []
    lines = re.findall(r"^  - (.*)", errors, re.MULTILINE) or [errors.strip().splitlines()[-1].removeprefix("error: ")]
    return None, [line.replace(f"{path.relative_to(top)}: ", "") for line in lines]


def given_names(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text())
    return values if isinstance(values, dict) else {}


def example(path: Path, top: Path, folder: Path, model: Path, chats: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Convert one file, and train what it becomes."""
    given = given_names(path)
    out = folder / "converted.yaml"
    settings, reasons = convert(path, top, out)
    record: dict[str, Any] = {"translated": settings is not None, "refused": reasons}
    if settings is None:
        dropped = [name for name in LEFT_OUT if value_at(given, name) is not None]
        words = ["--without", ",".join(dropped)] if dropped else []
        if "dataset_mixture.test_split_size" in dropped:
            words.append("eval.fraction=0.05")
        settings, _ = convert(path, top, out, *words) if dropped else (None, [])
        if settings is None:
            return record
        record["translated_without"] = dropped
    record["checks"] = re.findall(r"^# CHECK (\S+):", out.read_text(), re.MULTILINE)
    wanted = {name: value for name, value in expected(given).items() if name not in ("checkpoint.every_steps",)}
    record["differences"] = differences(settings, wanted)
    record |= train(settings, folder, model, chats)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    args = parser.parse_args()
    folder = args.folder.resolve()
    origins = json.loads((folder / "origins.json").read_text())
    examples, counts = [], Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        demo, work = Path(temporary) / "demo", Path(temporary) / "work"
        write_demo(demo, 42, num_train=60, num_held_out=4)
        chats = list(sample_conversations(40, 1, held_out=False))
        for path in sorted(path for path in folder.rglob("*.y*ml") if args.only in str(path)):
            name = str(path.relative_to(folder))
            dialect, repository = name.split("/")[:2]
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            record = example(path, folder / dialect / repository, work, demo / MODEL_DIR, chats)
            examples.append({"dialect": dialect, **origins[name], **record})
            state = "translated" if record["translated"] else "refused"
            state = "translated without some names" if "translated_without" in record else state
            counts[f"{dialect}: {state}"] += 1
            wrong = record.get("differences") or record.get("error") or ""
            counts["wrong or not trained"] += bool(wrong)
            print(f"{state:<14.14} {record.get('steps', '-')} steps  {name} {wrong}", flush=True)
    names = Counter(reason.partition(":")[0] for each in examples for reason in {*each["refused"]})
    summary = {"files": len(examples), **dict(sorted(counts.items())), "refused most": dict(names.most_common(25))}
    print(json.dumps(summary, indent=1))
    if args.out:
        args.out.write_text(json.dumps({"summary": summary, "examples": examples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
