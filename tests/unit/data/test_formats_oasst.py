from typing import Any

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Origin
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow

# id, parent, role, text, rank, deleted; children stand before their parents on purpose
TREE = [
    ("a2", "q1", "assistant", "second", 1, False),
    ("q1", None, "prompter", "question", None, False),
    ("a1", "q1", "assistant", "best", 0, False),
    ("a3", "q1", "assistant", "unranked", None, False),
    ("q2", "a1", "prompter", "and then?", None, False),
    ("b1", "q2", "assistant", "then this", None, False),
    ("b2", "q2", "assistant", "or that", None, False),
    ("q3", "a2", "prompter", "left without a reply", None, False),
    ("x1", "q1", "assistant", "spam", 2, True),
    ("x2", "x1", "prompter", "below spam", None, False),
    ("o1", "gone", "assistant", "parent not in the data", None, False),
    ("r2", None, "prompter", "a root without a reply", None, False),
]


def rows(tree: list[tuple[Any, ...]]) -> list[RawRow]:
    keys = ("message_id", "parent_id", "role", "text", "rank", "deleted")
    return [RawRow(Origin("t.jsonl", n), dict(zip(keys, node, strict=True))) for n, node in enumerate(tree, start=1)]


def threaded(tree: list[tuple[Any, ...]], **settings: Any) -> tuple[list[Conversation], list[str], list[str]]:
    bad: list[str] = []
    notes: list[str] = []
    raws = rows(tree)
    parser = make_parser(SourceConfig(path="t.jsonl", **settings), raws[0])
    gathered = parser.gather(raws, lambda error: bad.append(str(error)), notes.append)
    samples = [parser.parse(raw) for raw in gathered]
    assert all(isinstance(sample, Conversation) for sample in samples)
    return samples, bad, notes  # type: ignore[return-value]  # asserted in the line above


def test_each_path_to_a_last_reply_is_a_conversation_and_each_message_is_learned_once() -> None:
    conversations, bad, notes = threaded(TREE)
    assert [[(m.content, m.train) for m in c.messages] for c in conversations] == [
        [("question", None), ("best", None), ("and then?", None), ("then this", None)],
        [("question", False), ("best", False), ("and then?", False), ("or that", None)],
        [("question", False), ("second", None)],
        [("question", False), ("unranked", None)],
    ]
    assert [c.origin.row_number for c in conversations] == [6, 7, 1, 4]
    assert bad == []
    assert notes == [
        "oasst: 12 messages in 2 trees form 4 conversations; dropped: 1 deleted, "
        "2 whose parent is deleted or not in the data, 2 questions without a reply"
    ]


def test_a_system_prompt_is_put_in_front_of_each() -> None:
    conversations, _, _ = threaded(TREE, system="s")
    assert [c.messages[0].content for c in conversations] == ["s"] * 4


def test_bad_rows_are_named_and_the_rest_is_threaded() -> None:
    tree = [
        ("q", None, "prompter", "t", None, False),
        ("a", "q", "assistant", None, None, False),
        ("q", None, "prompter", "again", None, False),
        ("b", "q", "judge", "t", None, False),
        ("c", "q", "assistant", "reply", "first", False),
        ("d", "q", "assistant", "reply", None, False),
    ]
    conversations, bad, _ = threaded(tree)
    assert [c.messages[-1].content for c in conversations] == ["reply"]
    assert bad[0] == "t.jsonl:2: text is null, not a string"
    assert bad[1] == "t.jsonl:3: message_id 'q' is given twice; first at t.jsonl:1"
    assert bad[2].startswith("t.jsonl:4: role 'judge' is unknown; allowed: system, developer, user, human, prompter")
    assert bad[3] == "t.jsonl:5: rank is a string, not a number"


def test_circles_are_left_out_and_deep_trees_need_no_recursion() -> None:
    circle = [("q", None, "prompter", "t", None, False), ("x", "y", "assistant", "t", None, False)]
    circle += [("y", "x", "prompter", "t", None, False), ("a", "q", "assistant", "t", None, False)]
    conversations, _, notes = threaded(circle)
    assert len(conversations) == 1
    assert "2 whose parent is deleted or not in the data" in notes[0]
    deep: list[tuple[Any, ...]] = [
        (str(n), str(n - 1) if n else None, ("prompter", "assistant")[n % 2], "t", None, False) for n in range(5000)
    ]
    conversations, _, _ = threaded(deep)
    assert [len(c.messages) for c in conversations] == [5000]


def test_whole_trees_make_the_same_conversations() -> None:
    def message(node: tuple[Any, ...]) -> dict[str, Any]:
        keys = ("message_id", "role", "text", "rank", "deleted")
        replies = [message(child) for child in TREE if child[1] == node[0]]
        return dict(zip(keys, (node[0], *node[2:]), strict=True)) | {"replies": replies}

    roots = [message(node) for node in TREE if node[1] is None]
    raws = [
        RawRow(Origin("t.jsonl", n), {"message_tree_id": root["message_id"], "tree_state": "ready", "prompt": root})
        for n, root in enumerate(roots, start=1)
    ]
    parser = make_parser(SourceConfig(path="t.jsonl"), raws[0])
    bad: list[str] = []
    samples = [parser.parse(raw) for raw in parser.gather(raws, lambda error: bad.append(str(error)))]
    assert [sample.messages for sample in samples] == [sample.messages for sample in threaded(TREE)[0]]  # type: ignore[union-attr]
    assert not bad
    torn = RawRow(Origin("t.jsonl", 9), {"prompt": roots[0] | {"replies": [5]}})
    list(parser.gather([torn], lambda error: bad.append(str(error))))
    assert bad == ["t.jsonl:9: message_id is null, not a string"]
