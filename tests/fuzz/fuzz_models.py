"""Model folders, adapters and tokenizers: everything that transformers or PEFT writes and a person may edit or lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fuzz_hostile import Mutation, damages, mutations, write_json
from fuzz_judge import Case
from fuzz_world import CASES, World, both

_SIZES = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
}  # fmt: skip
_TRAIN = ("train", "run.yaml", "batch.max_steps=1", "checkpoint.every_steps=null")
_PLAN = ("plan", "run.yaml")
_CHAT = ("chat", "model", "--prompt", "Hi.", "--max-new-tokens", "1")
_INPUTS = ("model", "data", "chats.jsonl", "run.yaml")
_ADAPTER = "run/final"


def model_cases(world: World) -> Iterator[Case]:
    """config.json, generation_config.json, and the weights' files."""
    config = world.json("model/config.json")
    for mutation in mutations(config):
        must = "refuse" if _is_no_model(mutation) else "either"
        for verb in (_PLAN, _TRAIN, _CHAT):
            # the plan asks for less than what loads
            about = ("config.json", str(mutation.path[-1]) if mutation.path else "config.json", "weights are missing")
            yield _model_case(
                world, f"config.json {mutation.name} {verb[0]}", verb, "config.json", mutation.spoil, must, about,
                drawn=True,
            )  # fmt: skip
    for name, change in CASES["code"].items():
        spoil = partial(write_json, tree=config | change)
        for verb in (_TRAIN, _CHAT):
            called = f"config.json code {name} {verb[0]}"
            yield _model_case(world, called, verb, "config.json", spoil, "refuse", ("config.json",))
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        for damage in damages(text=file != "model.safetensors"):
            needed = file != "generation_config.json" or damage.name != "missing"
            must = "refuse" if needed and not damage.harmless and damage.name != "crlf" else "accept"
            for verb in (_TRAIN, _CHAT):
                # an answer takes its settings from there; training only copies them
                asked = must if file != "generation_config.json" or verb is _CHAT or must == "accept" else "either"
                yield _model_case(
                    world, f"{file} {damage.name} {verb[0]}", verb, file, damage.spoil, asked, (file, "safetensors")
                )
    for mutation in mutations(world.json("model/generation_config.json")):
        yield _model_case(
            world, f"generation_config.json {mutation.name}", _CHAT, "generation_config.json", mutation.spoil,
            "either", ("generation_config.json", *map(str, mutation.path[-1:])), drawn=True,
        )  # fmt: skip


def _model_case(
    world: World,
    name: str,
    argv: tuple[str, ...],
    file: str,
    spoil: Callable[[Path], object],
    must: Any,
    about: tuple[str, ...],
    *,
    drawn: bool = False,
) -> Case:
    return Case(
        name, argv, both(world.put(*_INPUTS), lambda here: spoil(here / "model" / file)), must, about,
        keeps=("chats.jsonl", "model"), done=_done(argv), drawn=drawn,
    )  # fmt: skip


def _done(argv: tuple[str, ...]) -> Any:
    if argv[0] == "chat":
        return None
    wanted = {"plan": "fingerprint", "train": "final"}.get(argv[0])
    return lambda here, out: None if wanted is None or wanted in out else f"no {wanted} in what was printed"


def _is_no_model(mutation: Mutation) -> bool:
    """Whether no model can have this config.json (leaving aside that the weights may fit another)."""
    if not mutation.path:
        return True
    name, value = mutation.path[0], mutation.value
    if mutation.how != "set" or name not in _SIZES:
        return name == "model_type" and mutation.how != "add"
    return isinstance(value, bool | str | list | dict) or (value is not None and not 0 < value < float("inf"))


def adapter_cases(world: World) -> Iterator[Case]:
    """adapter_config.json and its weights, in an answer, a merge, and a run that goes on from them."""
    answer = ("chat", "run", "--prompt", "Hi.", "--max-new-tokens", "1")
    merge = ("merge", "run", "--out", "merged")
    again = ("train", "run.yaml", "run_dir=new", f"lora.continue_from={_ADAPTER}", "batch.max_steps=1")

    def case(
        name: str, argv: tuple[str, ...], file: str, spoil: Callable[[Path], object], must: Any, drawn: bool = False
    ) -> Case:
        def done(here: Path, out: str) -> str | None:
            return None if argv[0] != "merge" or (here / "merged/model.safetensors").is_file() else "nothing was merged"

        return Case(
            f"{name} {argv[0]}", argv, both(world.put(*_INPUTS, "run"), lambda here: spoil(here / _ADAPTER / file)),
            must, (file, "adapter", "run/final has no") if must == "refuse" else (),
            keeps=("run/checkpoints", "model"), done=done, drawn=drawn,
        )  # fmt: skip

    for mutation in mutations(world.json(f"{_ADAPTER}/adapter_config.json")):
        for argv in (answer, merge, again):
            must = "refuse" if _is_no_adapter(mutation) else "either"
            yield case(f"adapter_config.json {mutation.name}", argv, "adapter_config.json", mutation.spoil, must, True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        for damage in damages(text=file.endswith("json")):
            for argv in (answer, merge, again):
                # JSON may be UTF-16
                must = "accept" if damage.harmless else "either" if damage.name == "utf-16" else "refuse"
                yield case(f"{file} {damage.name}", argv, file, damage.spoil, must)


def _is_no_adapter(mutation: Mutation) -> bool:
    if not mutation.path:
        return True
    name, value = mutation.path[0], mutation.value
    if mutation.how == "add" or len(mutation.path) > 1:
        return False
    if name == "r":
        return mutation.how == "drop" or value != 2
    if name == "target_modules":
        return not value or not isinstance(value, str | list)
    return name == "peft_type" and mutation.how == "set" and value is not None


def tokenizer_cases(world: World) -> Iterator[Case]:  # noqa: C901  (a list of cases)
    """tokenizer.json, tokenizer_config.json and the chat template, in a build and in an answer."""
    build = (
        "data", "build", "chats.jsonl", "--tokenizer", "model", "--name", "new", "--num-procs", "1", "-n", "3"
    )  # fmt: skip

    def case(
        name: str, argv: tuple[str, ...], file: str, spoil: Callable[[Path], object], must: Any, drawn: bool = False
    ) -> Case:
        def done(here: Path, out: str) -> str | None:
            return None if argv[0] == "chat" or (here / "data/built_dataset/new").is_dir() else "built nothing"

        about = (file, "tokenizer", "template") if must != "accept" else ()
        return Case(
            f"{name} {argv[0]}", argv, both(world.put("model", "chats.jsonl"), lambda here: spoil(here / "model" / file)),  # noqa: E501
            must, about, keeps=("chats.jsonl", "model"), done=done, drawn=drawn,
        )  # fmt: skip

    for file in ("tokenizer.json", "tokenizer_config.json"):
        for mutation in mutations(world.json(f"model/{file}"), widest=25):
            must = "refuse" if not mutation.path and file == "tokenizer.json" else "either"
            for argv in (build, _CHAT):
                yield case(f"{file} {mutation.name}", argv, file, mutation.spoil, must, True)
        for damage in damages(text=True):
            for argv in (build, _CHAT):
                must = "accept" if damage.harmless else "refuse"
                if damage.name == "missing" and file == "tokenizer_config.json":
                    must = "either"
                if damage.name == "latin-1":
                    must = "either"
                yield case(f"{file} {damage.name}", argv, file, damage.spoil, must)
    for name, (must, text) in _TEMPLATES.items():
        for argv in (build, _CHAT):
            spoil = lambda file, text=text: _replace(file, text)  # noqa: E731
            yield case(f"template {name}", argv, "chat_template.jinja", spoil, must)


_TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
_TEMPLATES = {name: (must, text.encode()) for name, (must, text) in CASES["templates"].items()} | {
    "deep": ("refuse", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}"),
    "utf-16": ("refuse", _TURNS.encode("utf-16")),
    "latin-1": ("refuse", f"{_TURNS}\u00e9".encode("latin-1")),
}


def _replace(file: Path, content: bytes) -> None:
    # a new file: the old one is a hard link to what all cases share
    file.unlink(missing_ok=True)
    file.write_bytes(content)
