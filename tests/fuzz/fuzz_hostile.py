"""Values and files that nobody meant to write: for any place of a JSON tree, and for any file."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


def _deep(depth: int) -> Any:
    tree: Any = []
    for _ in range(depth):
        tree = [tree]
    return tree


VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus-one": -1,
    "two-to-31": 1 << 31,
    "two-to-63": 1 << 63,
    "billion": 10**9,
    "four-hundred-digits": 10**400,
    "half": 0.5,
    "minus-half": -0.5,
    "1e308": 1e308,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus-inf": float("-inf"),
    "empty-text": "",
    "text": "zebra",
    "space": " ",
    "digits": "12",
    "dots": "../../..",
    "slash": "/",
    "nul": "a\0b",
    "escape-code": "\x1b[31mred\x1b]0;title\x07",
    "newline": "a\nerror: b",
    "surrogate": "\ud800",
    "private-use": "\ue000\uf8ff",
    "right-to-left": "\u202egnp.exe",
    "long-text": "long" * 5000,
    "empty-list": [],
    "list": ["zebra"],
    "list-of-null": [None],
    "nested-list": [[1, [2, [3]]]],
    "deep-list": _deep(90),
    "empty-map": {},
    "map": {"zebra": 1},
    "map-of-null": {"": None},
}


@dataclass(frozen=True)
class Mutation:
    """A changed copy of a JSON tree: at `path` something was set, dropped or added."""

    name: str
    path: tuple[str | int, ...]
    how: Literal["set", "drop", "add"]
    value: Any
    tree: Any

    def spoil(self, file: Path) -> None:
        write_json(file, self.tree)


def mutations(tree: Any, widest: int = 40) -> Iterator[Mutation]:
    """Every value of VALUES at every place, each key dropped, a key added to each map.

    Of lists and maps with more than `widest` entries only the first few are entered.
    """
    for path, found in _places(tree, (), widest):
        where = ".".join(map(str, path)) or "all"
        for name, value in VALUES.items():
            if type(value) is not type(found) or value != found:
                yield Mutation(f"{where}={name}", path, "set", value, _with(tree, path, value))
        if path:
            yield Mutation(f"{where}-dropped", path, "drop", None, _without(tree, path))
        if isinstance(found, Mapping):
            yield Mutation(f"{where}+key", path, "add", 1, _with(tree, (*path, "zebra"), 1))


def _places(tree: Any, path: tuple[str | int, ...], widest: int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    yield path, tree
    inner: list[tuple[str | int, Any]] = []
    if isinstance(tree, Mapping):
        inner = list(tree.items())
    elif isinstance(tree, list):
        inner = list(enumerate(tree))
    for key, value in inner[: widest if len(inner) <= widest else 2]:
        yield from _places(value, (*path, key), widest)


def _with(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(tree)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _without(tree: Any, path: tuple[str | int, ...]) -> Any:
    changed = copy.deepcopy(tree)
    place = changed
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return changed


@dataclass(frozen=True)
class Damage:
    """A way to spoil a file that is there; `harmless` where a reader must not mind."""

    name: str
    spoil: Callable[[Path], None]
    harmless: bool = False


def damages(*, text: bool) -> Iterator[Damage]:
    """Ways to spoil any file; of a text file also its encoding and line ends."""
    yield Damage("missing", Path.unlink)
    yield Damage("empty", lambda file: _write(file, b""))
    yield Damage("half", lambda file: _write(file, file.read_bytes()[: file.stat().st_size // 2]))
    yield Damage("one-byte-short", lambda file: _write(file, file.read_bytes()[:-1].rstrip()[:-1]))
    yield Damage("one-byte", lambda file: _write(file, file.read_bytes()[:1]))
    yield Damage("zeros", lambda file: _write(file, bytes(file.stat().st_size)))
    yield Damage("first-byte", lambda file: _write(file, b"\xff" + file.read_bytes()[1:]))
    yield Damage("gzip", lambda file: _write(file, gzip.compress(file.read_bytes())))
    yield Damage("web-page", lambda file: _write(file, b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"))
    yield Damage("lfs-pointer", lambda file: _write(file, b"version https://git-lfs.github.com/spec/v1\nsize 99\n"))
    yield Damage("directory", _make_directory)
    yield Damage("dangling-link", _dangle)
    yield Damage("link-to-itself", _link_to_itself)
    yield Damage("link", _link, harmless=True)
    if text:
        yield Damage("utf-16", lambda file: _write(file, file.read_text("utf-8").encode("utf-16")))
        yield Damage("latin-1", lambda file: _write(file, file.read_bytes().replace(b"o", "\u00f3".encode("latin-1"))))
        yield Damage("nul-inside", lambda file: _write(file, file.read_bytes()[:9] + b"\0" + file.read_bytes()[9:]))
        yield Damage("twice", lambda file: _write(file, file.read_bytes() * 2))
        yield Damage("deep-brackets", lambda file: _write(file, b"[" * 100_000))
        yield Damage("deep-braces", lambda file: _write(file, b'{"a":' * 50_000))
        yield Damage("crlf", lambda file: _write(file, file.read_bytes().replace(b"\n", b"\r\n")), harmless=True)


def write_json(file: Path, tree: Any) -> None:
    """As Python writes it: NaN and Infinity as such, lone surrogates escaped."""
    _write(file, json.dumps(tree).encode())


def _write(file: Path, content: bytes) -> None:
    # a new file: the old one may be a hard link to what all cases share
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def _make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _dangle(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _link(file: Path) -> None:
    moved = file.with_name(f".moved-{file.name}")
    file.rename(moved)
    file.symlink_to(moved.name)
