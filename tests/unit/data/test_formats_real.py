"""Real data sets, where the checkout has them beside it: every row parses, and counts agree with a plain reading."""

import json
import lzma
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, ParsedRow, PlainText, PreferenceRow
from flatout.data.rows.converter import converted
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.sources import open_source
from flatout.errors import DataError

DATA = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the real data sets are not beside this checkout")
DEMO = "llamafactory_demo"
OASST = f"{Path(__file__).parents[3]}/examples/formats/oasst.py:rows"
Rows = list[dict[str, Any]]


def read(name: str, **settings: Any) -> list[ParsedRow]:
    source = SourceConfig(path=str(DATA / name), **settings)
    samples, bad = parsed(source)
    assert not bad
    return samples


def parsed(source: SourceConfig) -> tuple[list[ParsedRow], list[str]]:
    """The samples of a source, and what is wrong with its other rows."""
    rows = list(converted(open_source(source), source).rows())
    parser = make_parser(source, rows[0])
    samples, bad = [], []
    for raw in rows:
        try:
            samples.append(parser.parse(raw))
        except DataError as error:
            bad.append(str(error))
    return samples, bad


def plain(name: str) -> Rows:
    path = DATA / name
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    rows: Rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]
    return rows


@dataclass(frozen=True)
class Chats:
    """A file and what a plain reading says of each of its rows: the texts of its turns, in order, "" for a call."""

    name: str
    texts: Callable[[dict[str, Any]], list[str]]
    columns: dict[str, str] = field(default_factory=dict)


def alpaca(row: dict[str, Any]) -> list[str]:
    return ["\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]]


def sharegpt(row: dict[str, Any]) -> list[str]:
    return ["" if turn["from"] == "function_call" else turn["value"] for turn in row["conversations"]]


def preference(row: dict[str, Any]) -> list[str]:
    return [*sharegpt(row), row["chosen"]["value"]]


def parts(row: dict[str, Any]) -> list[str]:
    return ["".join(part["value"] for part in turn["content"] if part["type"] == "text") for turn in row["messages"]]


GSM8K = {"instruction": "question", "output": "answer"}
CHATS = [
    Chats("alpaca_5000/alpaca_5000.json", alpaca),
    Chats("t0_50k/t0_50k.jsonl.xz", alpaca),
    Chats("gsm8k/train_3000.jsonl", lambda row: [row["question"], row["answer"]], GSM8K),
    Chats(f"{DEMO}/alpaca_zh_demo.json", alpaca),
    Chats(f"{DEMO}/identity.json", alpaca),
    Chats(f"{DEMO}/dpo_en_demo.json", preference, {"completion": "chosen"}),
    Chats(f"{DEMO}/glaive_toolcall_en_demo.json", sharegpt),
    Chats(f"{DEMO}/glaive_toolcall_zh_demo.json", sharegpt),
    Chats(f"{DEMO}/v1_sft_demo.jsonl", parts),
    Chats(f"{DEMO}/reason_tool_use_demo_50.jsonl", parts),
]


@pytest.mark.parametrize("chats", CHATS, ids=lambda chats: chats.name)
def test_every_row_of_a_chat_set_parses(chats):
    rows = plain(chats.name)
    start = time.process_time()
    samples = read(chats.name, columns=chats.columns)
    cpu_s = time.process_time() - start
    assert len(samples) == len(rows) > 0
    assert cpu_s < 15, "about 1 s for the 55,185 rows of t0_50k on one core; far more is a slow path"
    for sample, row in zip(samples, rows, strict=True):
        assert isinstance(sample, Conversation)
        assert [message.content for message in sample.messages] == chats.texts(row)


def test_bad_examples_of_kto_are_left_out():
    name = f"{DEMO}/kto_en_demo.json"
    kept, bad = parsed(SourceConfig(path=str(DATA / name)))
    labels = [row["label"] for row in plain(name)]
    assert (len(kept), len(bad)) == (labels.count(True), labels.count(False))
    assert all("label is false" in problem for problem in bad)


@pytest.mark.parametrize(("name", "settings"), [("dpo_en_demo", {}), ("kto_en_demo", {"format": "kto"})])
def test_every_pair_and_every_labelled_answer_parses(name, settings):
    rows = plain(f"{DEMO}/{name}.json")
    samples, bad = parsed(SourceConfig(path=str(DATA / f"{DEMO}/{name}.json"), **settings))
    assert (len(samples), bad) == (len(rows), [])
    for sample, row in zip(samples, rows, strict=True):
        assert isinstance(sample, PreferenceRow)
        if name == "dpo_en_demo":
            turns = [[*row["conversations"], row[answer]] for answer in ("chosen", "rejected")]
        else:
            turns = [[{"value": turn["content"]} for turn in row["messages"]]]
        written = [[turn["value"] for turn in answer] for answer in turns]
        assert [[message.content for message in answer.messages] for answer in sample.answers] == written
        assert dict(sample.columns) == ({} if "chosen" in row else {"label": (int(row["label"]),)})


def test_tool_calls_come_out_as_they_were_written():
    name = f"{DEMO}/glaive_toolcall_zh_demo.json"
    written = [
        json.loads(m["value"]) for row in plain(name) for m in row["conversations"] if m["from"] == "function_call"
    ]
    samples = [sample for sample in read(name) if isinstance(sample, Conversation)]
    found = [call for sample in samples for message in sample.messages for call in message.tool_calls]
    assert [{"name": call.name, "arguments": call.arguments} for call in found] == written
    assert [[tool["function"] for tool in sample.tools] for sample in samples] == [
        json.loads(r["tools"]) for r in plain(name)
    ]


def test_typed_parts_come_out_as_they_were_written():
    name = f"{DEMO}/reason_tool_use_demo_50.jsonl"
    written: dict[str, list[Any]] = {"text": [], "reasoning": [], "tool_call": []}
    for row in plain(name):
        for part in (part for message in row["messages"] for part in message["content"]):
            written[part["type"]].append(part["value"])
    messages = [m for sample in read(name) if isinstance(sample, Conversation) for m in sample.messages]
    assert [m.content for m in messages if m.content] == written["text"]
    assert [m.reasoning for m in messages if m.reasoning is not None] == written["reasoning"]
    calls = [{"name": call.name, "arguments": call.arguments} for m in messages for call in m.tool_calls]
    assert calls == [json.loads(value) for value in written["tool_call"]]


def test_loss_weights_become_train_flags():
    flags = [m.train for s in read(f"{DEMO}/v1_sft_demo.jsonl") if isinstance(s, Conversation) for m in s.messages]
    assert flags == [False, True] * 500


def test_oasst_threads_agree_with_a_recursive_reading():
    rows = [row for row in plain("oasst1_en_val/en-validation.jsonl") if not row["deleted"]]
    children: dict[str | None, Rows] = {}
    for row in rows:
        children.setdefault(row["parent_id"], []).append(row)

    def replies(row: dict[str, Any], above: list[str]) -> list[list[str]]:
        path = [*above, row["text"]]
        below = [found for child in children.get(row["message_id"], []) for found in replies(child, path)]
        return below or ([path] if row["role"] == "assistant" else [])

    wanted = [path for root in children[None] for path in replies(root, [])]
    conversations = [s for s in read("oasst1_en_val", format=OASST) if isinstance(s, Conversation)]
    assert sorted([m.content for m in c.messages] for c in conversations) == sorted(wanted)
    assert len(conversations) == 928
    learned = [m for c in conversations for m in c.messages if m.role == "assistant" and m.train is None]

    def num_replies(row: dict[str, Any]) -> int:
        return (row["role"] == "assistant") + sum(num_replies(child) for child in children.get(row["message_id"], []))

    assert len(learned) == sum(num_replies(root) for root in children[None]), "each reply is learned once"


def test_plain_text_is_one_document():
    samples = read(f"{DEMO}/wiki_demo.txt")
    assert [s.text for s in samples if isinstance(s, PlainText)] == [
        (DATA / DEMO / "wiki_demo.txt").read_bytes().decode()
    ]
