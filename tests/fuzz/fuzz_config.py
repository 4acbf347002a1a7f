"""Settings: every field of the schema with every hostile value, in the file and as an override, and the file itself."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from fuzz_hostile import VALUES, damages
from fuzz_judge import Case
from fuzz_world import CASES, SETTINGS, World, both, settings

Schema = Mapping[str, Any]
_YES_AND_NO = {"yes", "no", "on", "off", "true", "false", "y", "n", "t", "f", "0", "1"}
_INPUTS = ("model", "data", "chats.jsonl", "run.yaml")


def cases(world: World) -> Iterator[Case]:
    """Single settings by the schema that `flatout init --schema` prints."""
    schema = _printed_schema()
    for names, field in _fields(schema, schema):
        dotted = ".".join(names)
        for what, value in VALUES.items():
            must = "either" if _may_be(value, field, schema) else "refuse"
            about = (names[-1], dotted) if must == "refuse" else ()
            # ranks that a setting asks for are processes; planning them is enough here
            verb = "plan" if dotted in ("gpus", "data.sources") or len(what) % 2 else "train"
            # what the schema refuses is refused before anything is read: the verb that reads nothing else is quickest
            argv = ("launch", "run.yaml", "--slurm") if must == "refuse" else (verb, "run.yaml")
            inputs = () if must == "refuse" else _INPUTS[:3]
            # values are counted and nested before they have names
            deep = ("line",) if "deep" in what and about else ()
            yield Case(
                f"{dotted}={what} {argv[0]}", argv, both(world.put(*inputs), _file(names, value)),
                must, about + deep, keeps=inputs[::2], done=_done(verb), drawn=True,
            )  # fmt: skip
            word = f"{dotted}={_as_override(value)}"
            if "\0" not in word and len(word) < 100_000:
                # YAML reads 1e+308 as text, which a path may be
                is_text = isinstance(value, float) and isinstance(yaml.safe_load(_as_override(value)), str)
                if is_text and _may_be(_as_override(value), field, schema):
                    must, about, inputs = "either", (), _INPUTS[:3]
                argv = (*(("launch", "run.yaml", "--slurm") if must == "refuse" else ("plan", "run.yaml")), word)
                yield Case(
                    f"{dotted}={what} override", argv, world.put(*inputs, "run.yaml"),
                    must, about, keeps=inputs[::2], done=_done("plan"), drawn=True,
                )  # fmt: skip
    for names in [(), *_sections(schema)]:
        where = ".".join((*names, "zebra"))
        yield Case(
            f"{where} unknown", ("launch", "run.yaml", "--slurm"), both(world.put(), _file((*names, "zebra"), 1)),
            "refuse", ("zebra",),
        )  # fmt: skip
    yield from _senseless(world)


def file_cases(world: World) -> Iterator[Case]:
    """The file around the settings: its bytes, its YAML, its Python, its DeepSpeed JSON."""
    for damage in damages(text=True):
        # YAML cut at a line's end is YAML; twice the same is a key given twice
        must = "either" if damage.harmless or damage.name in ("one-byte-short", "half") else "refuse"
        yield Case(
            f"file {damage.name}", ("plan", "run.yaml"),
            both(world.put(*_INPUTS), lambda here, spoil=damage.spoil: spoil(here / "run.yaml")),
            must, ("run.yaml",),
        )  # fmt: skip
    for name, (must, text) in _texts().items():
        yield Case(
            f"text {name}", ("plan", "run.yaml"),
            both(world.put(*_INPUTS[:3]), lambda here, t=text: (here / "run.yaml").write_bytes(t)),
            must, ("run.yaml",),
        )  # fmt: skip
    for name, text in CASES["python"].items():
        yield Case(
            f"python {name}", ("plan", "run.py"),
            both(world.put(*_INPUTS[:3]), lambda here, t=text: (here / "run.py").write_text(t)),
            "refuse", ("run.py",), quotes=True,
        )  # fmt: skip
    for name, word in {"dev-zero": "/dev/zero", "folder": ".", "absent": "no/such.yaml", "long": "x" * 5000}.items():
        yield Case(f"path {name}", ("plan", word), world.put(*_INPUTS), "refuse", (word[:40],))
    deep = {"deep": "lora.targets=" + "[" * 400 + "]" * 400}
    for name, word in (CASES["overrides"] | deep).items():
        yield Case(f"override {name}", ("plan", "run.yaml", word), world.put(*_INPUTS), "refuse")
    contents = {name: text.encode() for name, text in CASES["deepspeed"].items()}
    contents |= {"latin-1": b'{"zero_optimization": {"stage": "\xe9"}}', "deep": b"[" * 100_000}
    for name, content in contents.items():
        yield Case(
            f"deepspeed {name}", ("plan", "run.yaml", "strategy=deepspeed", "deepspeed=ds.json"),
            both(world.put(*_INPUTS), lambda here, c=content: (here / "ds.json").write_bytes(c)),
            "refuse", ("ds.json", "deepspeed", "stage", "zero_optimization", "optimizer", "scheduler"),
        )  # fmt: skip


def _printed_schema() -> dict[str, Any]:
    from flatout.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["init", "--schema"]) == 0
    return json.loads(printed.getvalue())


def _fields(section: Schema, schema: Schema, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Every setting and every section with its schema; of a source the settings stand in `data.sources.0`."""
    for name, field in section["properties"].items():
        yield (*prefix, name), field
        for kind in [field, *field.get("anyOf", [])]:
            if "$ref" in kind:
                yield from _fields(_resolved(kind, schema), schema, (*prefix, name))
            elif "$ref" in kind.get("items", {}):
                yield from _fields(_resolved(kind["items"], schema), schema, (*prefix, name, "0"))


def _sections(schema: Schema) -> Iterator[tuple[str, ...]]:
    for names, field in _fields(schema, schema):
        if any("$ref" in kind for kind in [field, *field.get("anyOf", [])]):
            yield names


def _resolved(field: Schema, schema: Schema) -> Schema:
    return schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field


def _may_be(value: Any, field: Schema, schema: Schema) -> bool:
    """Whether a value may be taken by the letter of the JSON schema, numbers and truth values also as text."""
    field = _resolved(field, schema)
    if "anyOf" in field:
        return any(_may_be(value, part, schema) for part in field["anyOf"])
    if "enum" in field or "const" in field:
        # YAML reads a bare `off` as false, and `on` as true
        names = field.get("enum", [field.get("const")])
        return value in names or (value is False and "off" in names) or (value is True and "on" in names)
    match field.get("type"):
        case "null":
            return value is None
        case "boolean":
            return value in (0, 1) or (isinstance(value, str) and value.lower() in _YES_AND_NO)
        case "integer" | "number" as kind:
            return _is_number_in(value, field, whole=kind == "integer")
        case "string":
            return isinstance(value, str) and re.search(field.get("pattern", ""), value) is not None
        case "array":
            inner = field.get("items", {})
            enough = isinstance(value, list) and len(value) >= field.get("minItems", 0)
            return enough and all(_may_be(part, inner, schema) for part in value)
        case "object":
            return isinstance(value, dict) and _may_be_object(value, field, schema)
    return True


def _may_be_object(value: dict[str, Any], field: Schema, schema: Schema) -> bool:
    known, others = field.get("properties", {}), field.get("additionalProperties", True)
    if not set(field.get("required", ())) <= value.keys() or (others is False and not value.keys() <= known.keys()):
        return False
    return not isinstance(others, dict) or all(_may_be(part, others, schema) for part in value.values())


def _is_number_in(value: Any, field: Schema, *, whole: bool) -> bool:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return not (
        (whole and value != int(value))
        or value < field.get("minimum", value)
        or value <= field.get("exclusiveMinimum", -math.inf)
        or value > field.get("maximum", value)
        or value >= field.get("exclusiveMaximum", math.inf)
    )


def _file(names: tuple[str, ...], value: Any) -> Any:
    def make(here: Path) -> None:
        (here / "run.yaml").write_text(yaml.dump(_set(SETTINGS, names, value)), encoding="utf-8")

    return make


def _set(tree: Any, names: tuple[str, ...], value: Any) -> Any:
    """A copy with the value at that place, sections made on the way."""
    if not names:
        return value
    if names[0] == "0":
        return [_set(tree[0], names[1:], value)]
    tree = tree if isinstance(tree, dict) else {}
    return {**tree, names[0]: _set(tree.get(names[0], {}), names[1:], value)}


def _as_override(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
    return json.dumps(value)


def _done(verb: str) -> Any:
    def done(here: Path, out: str) -> str | None:
        if verb == "plan":
            return None if "fingerprint" in out else "planned nothing"
        runs = [*here.glob("*/final"), *here.glob("runs/*/final")]
        return None if runs or list(here.rglob("final")) else "trained nothing"

    return done


def _senseless(world: World) -> Iterator[Case]:
    def folder(here: Path) -> None:
        (here / "folder.jinja").mkdir()

    long = {"deepspeed is long text": (["strategy=deepspeed", "deepspeed=" + "x" * 5000], ["deepspeed"])}
    for name, (words, about) in (CASES["senseless"] | long).items():
        yield Case(
            f"senseless {name}", ("train", "run.yaml", *words), both(world.put(*_INPUTS), folder), "refuse",
            tuple(about),
            keeps=("model", "chats.jsonl"),
        )  # fmt: skip


def _bomb(kind: str) -> bytes:
    """Aliases of aliases: 9 levels of 9 make 4e8 values of a few hundred bytes."""
    opening, closing = ("{", "}") if kind == "map" else ("[", "]")
    lines = [f"a0: &a0 {opening}{'k: v' if kind == 'map' else 'v'}{closing}"]
    for level in range(1, 10):
        inner = ", ".join(f"k{i}: *a{level - 1}" if kind == "map" else f"*a{level - 1}" for i in range(9))
        lines.append(f"a{level}: &a{level} {opening}{inner}{closing}")
    return "\n".join(lines).encode()


def _texts() -> dict[str, tuple[str, bytes]]:
    base = yaml.safe_dump(settings())
    return {
        "comments only": ("refuse", b"# nothing\n"),
        "a list": ("refuse", b"- a\n- b\n"),
        "a number": ("refuse", b"7\n"),
        "a text": ("refuse", b"model\n"),
        "two documents": ("refuse", (base + "---\n" + base).encode()),
        "byte order mark": ("accept", b"\xef\xbb\xbf" + base.encode()),
        "crlf": ("accept", base.replace("\n", "\r\n").encode()),
        "JSON": ("accept", json.dumps(SETTINGS).encode()),
        "tabs": ("refuse", base.replace("  ", "\t").encode()),
        "bomb of lists": ("refuse", _bomb("list")),
        "bomb of maps": ("refuse", _bomb("map")),
        "30 brackets": ("refuse", b"data: " + b"[" * 30 + b"]" * 30),
        "3000 brackets": ("refuse", b"data: " + b"[" * 3000 + b"]" * 3000),
        "3000 open brackets": ("refuse", b"data: " + b"[" * 3000),
        "3000 maps": ("refuse", b"data: " + b"{a: " * 3000 + b"1" + b"}" * 3000),
        "3000 dashes": ("refuse", b"- " * 3000 + b"1"),
        "alias to itself": ("refuse", b"data: &a [*a]\n"),
        "merge key": ("accept", b"x-base: &b {}\n"[:0] + base.encode()),
        "merge of text": ("refuse", base.encode() + b"<<: zebra\n"),
        "python object": ("refuse", b"model: !!python/object/apply:os.system ['echo x']\n"),
        "python name": ("refuse", b"model: !!python/name:os.system\n"),
        "set": ("refuse", base.encode() + b"freeze: !!set {a, b}\n"),
        "binary": ("refuse", base.encode() + b"strategy: !!binary aGVsbG8=\n"),
        "bad binary": ("refuse", base.encode() + b"strategy: !!binary '*'\n"),
        "date": ("refuse", base.encode() + b"strategy: 2026-11-22\n"),
        "no such date": ("refuse", base.encode() + b"strategy: 2026-13-45\n"),
        "number key": ("refuse", base.encode() + b"1: a\n"),
        "null key": ("refuse", base.encode() + b"~: a\n"),
        "list key": ("refuse", base.encode() + b"? [a, b]\n: c\n"),
        "key twice": ("refuse", base.encode() + b"name: again\n"),
        "sexagesimal": ("refuse", base.encode() + b"strategy: 190:20:30\n"),
        "huge number": ("refuse", base.encode() + b"log_every_steps: " + b"9" * 5000 + b"\n"),
        "escape codes": ("refuse", base.encode() + b'strategy: "\\e[31mred"\n'),
        "escape code key": ("refuse", base.encode() + b'"\\e[31mred": 1\n'),
        "2 MiB": ("refuse", base.encode() + b"# x\n" * (1 << 19)),
    }
