"""OASST message trees, one message per row: threads the whole source into conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.data.conversation import Origin
from flatout.data.rows.formats.conversations import role_of
from flatout.data.rows.formats.fields import FieldError, Reading, kind, optional_text, text_at
from flatout.data.rows.formats.refusals import refusal
from flatout.data.rows.read import BadRow, RawRow

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


def is_tree(value: object) -> bool:
    """Return whether a message contains its replies, as in OASST's files of whole trees."""
    return isinstance(value, Mapping) and "replies" in value


def thread(rows: Iterable[RawRow], reading: Reading, bad_row: BadRow, log: Callable[[str], None]) -> Iterator[RawRow]:
    """Yield one row of messages for each root-to-leaf path that ends in a reply; the whole source is held in memory.

    All paths are kept, so no reply is lost; the best-ranked child goes first (null ranks last, then file order). A
    message that several paths share carries loss only in the first of them (`train: false` in the others), so none is
    learned twice. A path is cut after its last reply. Deleted messages, messages whose parent is not in the data, and
    everything below either are left out and reported by `log`. A row's origin is its last message's. Malformed rows,
    duplicate ids and cycles go to `bad_row`.
    """
    nodes = _read_nodes(rows, reading, bad_row)
    children: dict[str | None, list[_Node]] = defaultdict(list)
    for node in sorted(nodes.values(), key=lambda node: node.rank):  # a stable sort keeps file order among equals
        if not node.deleted:
            children[node.parent_id].append(node)
    ordered: list[_Node] = []  # depth first, children in order; a loop, since a tree may be deeper than the stack
    waiting = children[None][::-1]
    while waiting:
        ordered.append(waiting.pop())
        waiting += reversed(children[ordered[-1].message_id])
    answered: set[str | None] = set()  # ids of messages with a reply of the assistant somewhere below
    for node in reversed(ordered):
        if node.role == "assistant" or node.message_id in answered:
            answered.add(node.parent_id)
    taught: set[str] = set()
    num_paths = 0
    for leaf in ordered:
        if leaf.role != "assistant" or leaf.message_id in answered:
            continue
        path = [leaf]
        while path[-1].parent_id is not None:
            path.append(nodes[path[-1].parent_id])
        turns = [
            {"role": node.role, "content": node.text} | ({"train": False} if node.message_id in taught else {})
            for node in reversed(path)
        ]
        taught.update(node.message_id for node in path)
        num_paths += 1
        yield RawRow(leaf.origin, {"messages": turns})
    num_deleted = sum(node.deleted for node in nodes.values())
    log(
        f"oasst: {len(nodes)} messages in {len(children[None])} trees form {num_paths} conversations; dropped: "
        f"{num_deleted} deleted, {len(nodes) - num_deleted - len(ordered)} whose parent is deleted or not in the data, "
        f"{len(ordered) - len(taught)} questions without a reply"
    )


def _read_nodes(rows: Iterable[RawRow], reading: Reading, bad_row: BadRow) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    for raw in (message for row in rows for message in _messages(row, reading)):
        try:
            node = _read_node(raw, reading)
            if node.message_id in nodes:
                first = nodes[node.message_id].origin
                raise FieldError(f"message_id {node.message_id!r} is given twice; first at {first}")
        except FieldError as bad:
            bad_row(bad.at(raw.origin))
        else:
            nodes[node.message_id] = node
    return nodes


def _messages(raw: RawRow, reading: Reading) -> Iterator[RawRow]:
    """Yield the messages of a row: for a tree, each with its parent's id, in file order; otherwise the row itself."""
    id_name, parent_name, tree_name = map(reading.name, ("message_id", "parent_id", "prompt"))
    prompt = raw.columns.get(tree_name)
    waiting: list[tuple[Any, Any]] = [(prompt, None)] if is_tree(prompt) else []
    if not waiting:
        yield raw
    while waiting:
        message, parent_id = waiting.pop()
        message = message if isinstance(message, dict) else {}  # its missing fields are reported later
        yield RawRow(raw.origin, message | {parent_name: parent_id})
        replies = message.get("replies")
        waiting += [(reply, message.get(id_name)) for reply in reversed(replies if isinstance(replies, list) else [])]


def _read_node(raw: RawRow, reading: Reading) -> _Node:
    row, rank_name = raw.columns, reading.name("rank")
    if why := refusal(row, reading, "oasst"):
        raise why
    rank = row.get(rank_name)
    try:
        order = float("inf") if rank is None or rank == "" else float(rank)
    except (TypeError, ValueError):
        raise FieldError(f"{rank_name} is {kind(rank)}, not a number") from None
    id_name, parent_name, text_name, role_name = map(reading.name, OASST_COLUMNS)
    parent_id = optional_text(row.get(parent_name), parent_name)
    return _Node(
        origin=raw.origin,
        message_id=text_at(row.get(id_name), id_name),
        parent_id=parent_id or None,  # csv has an empty text if there is no parent
        role=role_of(row.get(role_name), role_name, reading),
        text=text_at(row.get(text_name), text_name),
        rank=order,
        deleted=row.get(reading.name("deleted")) in (True, "true", "True"),
    )
