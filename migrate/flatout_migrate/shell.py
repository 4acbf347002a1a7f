"""The commands of a shell script: their words, with the variables that the script itself sets worked out."""

from __future__ import annotations

import re
from collections import Counter
from itertools import takewhile
from pathlib import Path

from flatout import UsageError
from flatout.api.settings import read_text

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

# a variable that a command sets, text that needs no quotes, and where a variable or a sum of whole numbers stands
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)\+?=(?P<value>.*)", re.DOTALL)
_SIMPLE = re.compile(r"[\w./:@%+,#-]+")
_VARIABLE = re.compile(r"(?<!\\)\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")
_SUM = re.compile(r"\$\((?:expr +(\d+) +\\?([*/+-]) +(\d+) *|\( *(\d+) *([*/+-]) *(\d+) *\))\)")
# before a command, in which it may set a variable, and commands that set variables by name
_BEFORE = {
    "if", "while", "until", "then", "else", "elif", "do", "{", "!", "export", "declare", "local", "readonly", "typeset",
}  # fmt: skip
_NAMED, _READS_FILE = {"for", "select", "read", "unset", "getopts", "mapfile"}, {"source", "."}
_OPENING, _CLOSING = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}


def commands_of(file: Path) -> tuple[list[list[str]], frozenset[str]]:
    """Return the words of each command, quoted as in the file, without comments and redirections; and unsure names.

    A variable that the script sets once, to plain text and outside of branches and loops, stands for its value from
    there on. Variables that it may set otherwise are unsure. Raises UsageError for quotes that are not closed.
    """
    known, commands = dict[str, str](), list[list[str]]()
    words_of_all = _words_of_all(file)
    times = Counter(name for words in words_of_all for name in _may_set(words))
    depth, unsure = 0, {name for name, count in times.items() if count > 1}
    for words in words_of_all:
        depth += len(_OPENING & {*words[:1]}) - len(_CLOSING & {*words[:1]})
        words = [_filled(word, known) for word in words]
        commands.append(words)
        if _READS_FILE & {*words[:1]}:
            known.clear()
        unsure |= _may_set(words) if depth else set()
        for name, value in assignments(words):
            if name not in unsure and _SIMPLE.fullmatch(plain(value)) and not replaced(value):
                known[name] = plain(value)
    return commands, frozenset(unsure)


def _may_set(words: list[str]) -> set[str]:
    """Return the names of variables that a command sets or may set for the commands after it."""
    start = next((place for place, word in enumerate(words) if word not in _BEFORE), len(words))
    named = set(filter(str.isidentifier, words[start + 1 :])) if _NAMED & {*words[start : start + 1]} else set()
    matches = map(_ASSIGNED.fullmatch, words[start:])
    assigned = takewhile(bool, matches) if start == 0 else filter(bool, matches)
    return named | {match["name"] for match in assigned if match}


def assignments(words: list[str]) -> list[tuple[str, str]]:
    """Return the names and values, quoted as they are, that a command of assignments alone sets; else none."""
    matches = [_ASSIGNED.fullmatch(word) for word in words[words[:1] == ["export"] :]]
    return [(each["name"], each["value"]) for each in matches if each] if all(matches) else []


def _filled(word: str, known: dict[str, str]) -> str:
    """Replace known variables and sums; a word with single quotes stays as it is."""
    if "'" in word:
        return word
    word = _VARIABLE.sub(lambda match: known.get(match["bare"] or match["braced"], match[0]), word)
    return _SUM.sub(lambda match: _worked_out(*(part for part in match.groups() if part)) or match[0], word)


def _worked_out(left: str, sign: str, right: str) -> str:
    one, other = int(left), int(right)
    if sign == "/":
        return str(one // other) if other else ""
    return str({"*": one * other, "+": one + other, "-": one - other}[sign])


def _words_of_all(file: Path) -> list[list[str]]:
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


def plain(word: str) -> str:
    """Return a word without its quotes."""
    return _QUOTED.sub(
        lambda part: (part[1] or "").strip("\n") or part[2] or _IN_DOUBLE_QUOTES.sub(r"\1", part[3] or ""), word
    )


def replaced(word: str) -> str:
    """Return what the shell would replace in a word; "" if it passes the word as it is."""
    bare = _QUOTED.sub(lambda part: re.sub(r"\\.", "", part[3] or "", flags=re.DOTALL), word)
    match = _REPLACED.search(bare)
    return match[0] if match else word if word.startswith("~") else ""
