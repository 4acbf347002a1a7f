"""OASST message trees, one message a row: threads them into conversations over the whole source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flatout.data.conversation import Origin
from flatout.data.formats.fields import FieldError, Reading, kind, optional_text, text_at
from flatout.data.formats.roles import role_of
from flatout.data.rows import BadRow, RawRow
from flatout.errors import DataError

OASST_COLUMNS = ("message_id", "parent_id", "text", "role")


@dataclass(frozen=True, slots=True)
class _Node:
    origin: Origin
    message_id: str
    parent_id: str | None
    role: str
    text: str
    rank: float
    deleted: bool


def thread(rows: Iterable[RawRow], reading: Reading, bad_row: BadRow, note: Callable[[str], None]) -> Iterator[RawRow]:
    """One row of messages for each root-to-leaf path that ends in a reply; holds the whole source in memory.

    All paths are kept, so no reply is lost; the best-ranked child goes first (null ranks last, then file order). A
    message that several paths share carries loss in the first of them only (`train: false` in the others), so none
    is learned twice. A path is cut after its last reply. Left out, and told by `note`: deleted messages, messages
    whose parent is not in the data, and everything below either. A row's origin is its last message's.
    Rows of wrong shape, ids given twice and circles go to `bad_row`.
    """
    nodes = _read_nodes(rows, reading, bad_row)
    children: dict[str | None, list[_Node]] = defaultdict(list)
    for node in nodes.values():
        if not node.deleted:
            children[node.parent_id].append(node)
    for siblings in children.values():
        siblings.sort(key=lambda node: node.rank)  # a stable sort keeps file order among equals
    seen: set[str] = set()
    taught: set[str] = set()
    num_paths = 0
    for root in children[None]:
        for path in _paths(root, children, seen):
            turns = [
                {"role": node.role, "content": node.text} | ({"train": False} if node.message_id in taught else {})
                for node in path
            ]
            taught.update(node.message_id for node in path)
            num_paths += 1
            yield RawRow(path[-1].origin, {"messages": turns})
    note(_summary(nodes, len(children[None]), num_paths, seen, taught))


def _read_nodes(rows: Iterable[RawRow], reading: Reading, bad_row: BadRow) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    for raw in rows:
        try:
            node = _read_node(raw, reading)
            if node.message_id in nodes:
                first = nodes[node.message_id].origin
                raise FieldError(f"message_id {node.message_id!r} is given twice; first at {first}")
        except FieldError as bad:
            bad_row(DataError(f"{raw.origin}: {bad}"))
        else:
            nodes[node.message_id] = node
    return nodes


def _read_node(raw: RawRow, reading: Reading) -> _Node:
    row = raw.row
    id_name, parent_name, text_name, role_name = (reading.name(column) for column in OASST_COLUMNS)
    parent_id = optional_text(row.get(parent_name), parent_name)
    return _Node(
        origin=raw.origin,
        message_id=text_at(row.get(id_name), id_name),
        parent_id=parent_id or None,  # csv has an empty text where there is no parent
        role=role_of(row.get(role_name), role_name, reading.roles),
        text=text_at(row.get(text_name), text_name),
        rank=_rank(row.get(reading.name("rank")), reading.name("rank")),
        deleted=row.get(reading.name("deleted")) in (True, "true", "True"),
    )


def _rank(value: Any, place: str) -> float:
    if value is None or value == "":
        return float("inf")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise FieldError(f"{place} is {kind(value)}, not a number") from None


def _paths(root: _Node, children: dict[str | None, list[_Node]], seen: set[str]) -> Iterator[list[_Node]]:
    """Paths from `root` to each reply that has no reply below it, depth first, children in order; no recursion."""
    path: list[_Node] = []
    answered: list[bool] = []  # whether a path that ends at or below path[i] was given
    stack: list[tuple[_Node, int]] = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield from _close(path, answered, depth)
        path.append(node)
        answered.append(False)
        seen.add(node.message_id)
        stack += [(child, depth + 1) for child in reversed(children[node.message_id])]
    yield from _close(path, answered, 0)


def _close(path: list[_Node], answered: list[bool], depth: int) -> Iterator[list[_Node]]:
    """Leaves nodes until the path is `depth` long; a reply left without a reply below it ends a conversation."""
    while len(path) > depth:
        given = answered[-1]
        if not given and path[-1].role == "assistant":
            yield list(path)
            given = True
        path.pop()
        answered.pop()
        if answered:
            answered[-1] = answered[-1] or given


def _summary(nodes: dict[str, _Node], num_trees: int, num_paths: int, seen: set[str], taught: set[str]) -> str:
    num_deleted = sum(node.deleted for node in nodes.values())
    num_orphans = len(nodes) - num_deleted - len(seen)
    return (
        f"oasst: {len(nodes)} messages in {num_trees} trees make {num_paths} conversations; left out: "
        f"{num_deleted} deleted, {num_orphans} whose parent is deleted or not in the data, "
        f"{len(seen) - len(taught)} questions without a reply"
    )
