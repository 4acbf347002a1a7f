"""The command of TRL or ms-swift in a shell script: its options and their values, as the shell would pass them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from flatout.compat.preference import SYSTEMS
from flatout.config.read import load_values, read_text
from flatout.errors import UsageError

# a trainer's command -> the system that `flatout convert` translates; TRL has a script of each name too
_KNOWN = {"trl sft": "trl"} | {name.replace("-", " "): name for name in SYSTEMS} | {"swift rlhf": "ms-swift"}
_PROGRAMS = {command.split()[0] for command in _KNOWN}
# commands of these programs that train nothing -> what does the same here
_BESIDE = {
    **dict.fromkeys(("swift infer", "swift app", "swift deploy", "trl chat"), "flatout chat"),
    **{"swift export": "flatout export", "swift merge-lora": "flatout merge", "swift eval": "flatout eval"},
    **dict.fromkeys(("swift sample", "swift rollout", "swift web-ui", "trl vllm-serve", "trl env"), ""),
}
_PIECE = re.compile(
    r"""(?:[ \t]|\\\n)+ | \#[^\n]*
    | (?P<redirection> (?:\d*|&)[<>]+[&|]? )
    | (?P<word> (?: \\. | '[^']*' | "(?:\\.|[^"\\])*" | \$\(.*?\) | `[^`]*` | [^\s\\'"`;&|<>()] )+ )
    | (?P<end> [\n;&|()]+ )""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""\\(.)|(?<!\$)'([^']*)'|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
_IN_DOUBLE_QUOTES = re.compile(r'\\(?:\n|([$`"\\]))')
_REPLACED = re.compile(r"\$(?:\w+|\{.*?\}|\(.*?\)|[@*#?!$'-])|`.*?`", re.DOTALL)


def read_command(file: Path) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Return the options of the one trainer that a script starts, with those of its `--config`, and the system.

    Also the commands of its programs that train nothing, and what does the same here. Raises UsageError for no trainer
    or several, and for a value that only the shell knows.
    """
    started = [one for words in _commands(file) if (one := _trainer(words))]
    beside = {name: _BESIDE[name] for name, _ in started if name in _BESIDE}
    found = [one for one in started if one[0] not in beside] or started[:1]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise UsageError(f"{file}: starts {names}; a configuration is of one run: leave one of them in the file")
    name, words = found[0] if found else ("", [])
    if name not in _KNOWN:
        what = f"{name} is not supported" if found else "starts no trainer"
        raise UsageError(
            f"{file}: {what}; expected a command such as `trl dpo --model_name_or_path ...` or `swift rlhf --model ...`"
        )
    given: dict[str, list[str]] = {}
    option = name
    for quoted in words:
        word = _plain(quoted)
        if word.startswith("--"):
            option, equals, word = word.partition("=")
            given[option] = [word] if equals else []
        elif option in given:
            given[option].append(word)
        else:
            raise UsageError(f"{file}: {option} {word}: expected an option such as --learning_rate")
        if replaced := _replaced(quoted):
            raise UsageError(f"{file}: {option}: the shell replaces {replaced}; write what it stands for")
    values = {option[2:]: _value(file, option, texts) for option, texts in given.items()}
    if "config" not in values:
        return values, _KNOWN[name], beside
    config = values.pop("config")
    if not isinstance(config, str):
        raise UsageError(f"{file}: --config: expected one file, found {config!r:.60}")
    return {**load_values(file.parent / config), **values}, _KNOWN[name], beside


def _commands(file: Path) -> list[list[str]]:
    """Return the words of each command, quoted as in the file, without comments and redirections."""
    text, at, is_target = read_text(file).replace("\r\n", "\n"), 0, False
    commands: list[list[str]] = [[]]
    while at < len(text):
        piece = _PIECE.match(text, at)
        wrong = "" if piece else f"{text[at]} is opened and not closed"
        word = piece["word"] if piece else ""
        if word and word.startswith("--") and not commands[-1]:
            wrong = f"{word:.60} starts a command; end the line before it by a \\ alone"
        if wrong or not piece:
            raise UsageError(f"{file}:{text.count(chr(10), 0, at) + 1}: {wrong}")
        at = piece.end()
        if word:
            commands[-1] += [] if is_target else [word]
        elif piece["end"]:
            commands.append([])
        if piece.lastgroup:
            is_target = piece.lastgroup == "redirection"
    return commands


def _trainer(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the name of the trainer that a command starts, and the words after it; None if it starts none."""
    plain = [Path(_plain(word)) for word in words]
    for at, path in enumerate(plain):
        if path.suffix == ".py" and f"trl {path.stem}" in _KNOWN:
            return f"trl {path.stem}", words[at + 1 :]
        if at and plain[at - 1].name in _PROGRAMS:
            return f"{plain[at - 1].name} {path.name}", words[at + 1 :]
    return None


def _plain(word: str) -> str:
    """Return a word without its quotes."""
    return _QUOTED.sub(
        lambda part: (part[1] or "").strip("\n") or part[2] or _IN_DOUBLE_QUOTES.sub(r"\1", part[3] or ""), word
    )


def _replaced(word: str) -> str:
    """Return what the shell would replace in a word; "" if it passes the word as it is."""
    bare = _QUOTED.sub(lambda part: re.sub(r"\\.", "", part[3] or "", flags=re.DOTALL), word)
    found = _REPLACED.search(bare)
    return found[0] if found else word if word.startswith("~") else ""


def _value(file: Path, option: str, texts: list[str]) -> Any:
    """Return the value of an option: true without a text, a list of several."""
    try:
        values = [yaml.safe_load(text) for text in texts]
    except (yaml.YAMLError, ValueError):
        found = " ".join(texts)
        raise UsageError(f"{file}: {option}: {found!r:.60} is not valid YAML; quote it once more for YAML") from None
    return True if not values else values if len(values) > 1 else values[0]
