"""`format: FILE.py:FUNCTION`: what a converter may give, when it runs, and the converters of examples/formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flatout.api.data import read_rows
from flatout.cli.main import main
from flatout.config.own_code import OwnCode
from flatout.config.schema import Config, DataConfig, ModelConfig, SourceConfig
from flatout.data.build import open_or_build, refuse_early
from flatout.data.conversation import Conversation, Message, Origin, ToolCall
from flatout.data.rows.converter import converted
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import BadRow, RawRow
from flatout.data.rows.sources import open_source
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, FlatoutError, ResourceError, SecurityError, UsageError
from flatout.studio.workspace import require_no_code

Row = dict[str, Any]
EXAMPLES = Path(__file__).parents[3] / "examples" / "formats"
U, A = Message("user", "Weather?"), Message("assistant", "Sunny.")
CALL = Message("assistant", "", tool_calls=(ToolCall("get", {"city": "Rome"}),))
RESULT = Message("tool", '{"sky": "blue"}')
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED = {"name": "get", "description": "asks", "parameters": SCHEMA}
TOOL = {"type": "function", "function": NAMED}
HELP = Message("system", "You help.")


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(rows: list[Row]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(rows: list[Row], converter: str, **settings: Any) -> tuple[list[Conversation], list[str], list[str]]:
    """The conversations that a converter makes of rows, what is wrong with other rows, and what it left out."""
    write(rows)
    bad, samples = list[str](), list[Conversation]()
    config = SourceConfig.model_validate({"path": "rows.jsonl", "format": converter, **settings})
    source = converted(open_source(config), config)
    for raw in source.rows(lambda error: bad.append(error.text)):
        try:
            sample = make_parser(config, raw).parse(raw)
        except DataError as error:
            bad.append(error.text)
            continue
        assert isinstance(sample, Conversation)
        samples.append(sample)
    return samples, bad, list(source.notes())


def build(tokenizer: Path, converter: str, **settings: Any) -> TokenStore:
    fixed = {
        "name": "d",
        "template": "chatml",
        "num_procs": 1,
        "sources": [{"path": "rows.jsonl", "format": converter}],
    }
    return open_or_build(DataConfig.model_validate(fixed | settings), str(tokenizer))


RIDDLES = [{"riddle": f"what is {number}", "solution": "it is" if number != 2 else None} for number in range(4)]
CHAT = '{"messages": [{"role": "user", "content": row["riddle"]}, {"role": "assistant", "content": row["solution"]}]}'


def own(body: str) -> None:
    """A converter of this body in own.py, and rows for it."""
    write(RIDDLES)
    Path("own.py").write_text(f"def rows(row):\n    {body}\n")


# what the function gives for a row -> how many samples, and bad rows, of RIDDLES
GIVEN = {
    CHAT: (3, 1),
    f'{CHAT} if row["solution"] else None': (3, 0),
    f'[{CHAT}, {CHAT}] if row["solution"] else []': (6, 0),
    '{"prompt": row["riddle"], "completion": row["solution"] or "no"}': (4, 0),
    '{"text": row["riddle"]}': (4, 0),
    '{"prompt": row["riddle"], "chosen": "yes", "rejected": "no"}': (8, 0),
    '{"text": row["riddle"], "label": row["solution"] or "none"}': (4, 0),
    '{"prompt": row["riddle"], "completion": "yes", "label": row["solution"] is None}': (4, 0),
    '{"input_ids": [5, 6, 7]}': (4, 0),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_function_gives_rows_of_any_format(given, small_tokenizer_dir):
    own(f"return {given}")
    store = build(small_tokenizer_dir, "own.py:rows", on_bad_row="skip")
    assert (store.num_samples, store.meta.counts["bad"]) == GIVEN[given]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return 5", "rows.jsonl:1: own.py:rows gives 5"),
        ("return [row, 'x']", "rows.jsonl:1: own.py:rows gives 'x'"),
        ("raise ValueError('no solution')", "rows.jsonl:1: no solution (own.py:2)"),
        ("return row['none']", "rows.jsonl:1: KeyError: 'none' (own.py:2)"),
        ("return None", "left out all 4 rows"),
        ("return 'too old'", "left out all 4 rows (too old)"),
        ("yield 5", "own.py:rows yields 5"),
        ("yield 1 / 0", "own.py:2 failed with ZeroDivisionError"),
    ],
)
def test_what_is_no_row_is_refused(body, named, small_tokenizer_dir):
    own(body)
    with pytest.raises(DataError) as caught:
        build(small_tokenizer_dir, "own.py:rows")
    assert named in caught.value.text


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("none.py:rows", "none.py cannot be read"),
        ("own.py:row", "own.py:row has no such function"),
        ("own.py:N", "is no"),
    ],
)
def test_what_is_no_converter_is_refused(file, named, small_tokenizer_dir):
    write(RIDDLES)
    Path("own.py").write_text("N = 1\n\n\ndef rows(row):\n    return {'text': row['riddle']}\n")
    with pytest.raises(UsageError) as caught:
        build(small_tokenizer_dir, file)
    assert named in caught.value.text
    assert build(small_tokenizer_dir, "own.py:rows").num_samples == 4


PAIRS = """
def rows(source):
    before = None
    for row in source:
        if before is None:
            yield row, "without a question"
        elif row["solution"] is None:
            yield row, ValueError("no solution")
        else:
            turns = [before["riddle"], row["riddle"]]
            yield row, {"conversations": [{"from": who, "value": said} for who, said in zip(("human", "gpt"), turns)]}
        before = row
"""


def test_a_generator_gets_all_rows_and_what_it_leaves_out_is_counted():
    Path("own.py").write_text(PAIRS)
    found, bad, notes = read(RIDDLES, "own.py:rows")
    assert [conversation.messages[0].content for conversation in found] == ["what is 0", "what is 2"]
    assert [conversation.origin.row_number for conversation in found] == [2, 4]
    assert bad == ["rows.jsonl:3: no solution (own.py)"]
    assert notes == ["own.py:rows left out 1 rows: 1 without a question"]


def test_the_rows_of_a_file_are_those_that_its_converter_makes() -> None:
    own("return {'text': row['riddle']}")
    assert list(read_rows("rows.jsonl", format="own.py:rows")) == [{"text": row["riddle"]} for row in RIDDLES]


def test_a_changed_converter_builds_again_and_a_moved_one_does_not(small_tokenizer_dir):
    own("return {'text': row['riddle']}")
    first = build(small_tokenizer_dir, "own.py:rows").meta.fingerprint
    Path("moved.py").write_bytes(Path("own.py").read_bytes())
    assert build(small_tokenizer_dir, "moved.py:rows").meta.fingerprint == first
    Path("own.py").write_text(
        "def rows(row):\n    return {'text': row['riddle'] + '?'}\n\n\n"
        "def others(row):\n    return {'text': row['riddle'] + '!'}\n"
    )
    assert (changed := build(small_tokenizer_dir, "own.py:rows").meta.fingerprint) != first
    assert build(small_tokenizer_dir, "own.py:others").meta.fingerprint != changed


def test_what_a_converter_imports_from_its_folder_is_hashed_too() -> None:
    write(RIDDLES)
    Path("parts").mkdir()
    Path("parts/words.py").write_text("import marks\nfrom . import more\nfrom .other import END\n")
    for name in ("__init__", "more", "other"):
        Path(f"parts/{name}.py").write_text("END = '.'\n")
    Path("marks.py").write_text("END = '?'\n")
    Path("own.py").write_text("import json\nfrom parts import words\n\n\ndef rows(row):\n    return row\n")
    config = SourceConfig.model_validate({"path": "rows.jsonl", "format": "own.py:rows"})
    first = converted(open_source(config), config).files
    parts = ["parts/__init__.py", "parts/words.py", "marks.py", "parts/more.py", "parts/other.py"]
    assert sorted(first) == sorted(["rows.jsonl", "own.py", *parts])
    Path("marks.py").write_text("END = '!'\n")
    assert converted(open_source(config), config).files["marks.py"] != first["marks.py"]


@pytest.mark.parametrize("body", ["return {'text': 'a'}", "yield from ((each, {'text': 'a'}) for each in row)"])
def test_an_error_of_reading_is_not_the_converters(body):
    def read_one(bad_row: BadRow) -> Iterator[RawRow]:
        yield RawRow(Origin("rows.jsonl", 1), {"riddle": "a"})
        if is_gone:
            raise ResourceError("the server is gone")

    own(body)
    config = SourceConfig.model_validate({"path": "rows.jsonl", "format": "own.py:rows"})
    source = converted(replace(open_source(config), read=read_one), config)
    is_gone = False
    assert len(list(source.rows())) == 1
    is_gone = True
    with pytest.raises(ResourceError, match="the server is gone"):
        list(source.rows())


def test_names_of_classes_stay_where_a_converter_leaves_the_column():
    names = {"label": ["no", "yes"], "kind": ["a", "b"]}
    own("return {'text': 'x', 'label': row['label'], 'kind': 'c'}")
    config = SourceConfig.model_validate({"path": "rows.jsonl", "format": "own.py:rows"})
    row = RawRow(Origin("rows.jsonl", 1), {"label": "yes", "kind": "b"}, names)
    source = converted(replace(open_source(config), read=lambda bad_row: iter([row])), config)
    assert [one.classes for one in source.rows()] == [{"label": ["no", "yes"]}]


@pytest.mark.parametrize("value", [["messages"], {"a": 1}, 3])
def test_a_format_that_is_no_text_is_refused(value):
    with pytest.raises(ValidationError, match="format"):
        SourceConfig.model_validate({"path": "rows.jsonl", "format": value})


def test_no_process_of_studio_runs_it(small_tokenizer_dir, tmp_path, monkeypatch):
    own("return {'text': row['riddle']}")
    with monkeypatch.context() as studio:
        studio.setenv("FLATOUT_STUDIO_FOLDERS", json.dumps([str(tmp_path)]))
        with pytest.raises(SecurityError, match=r"own\.py would run as code"):
            OwnCode.read("own.py:rows", "format", "converter").load()
    assert build(small_tokenizer_dir, "own.py:rows").num_samples == 4


def test_lines_that_are_no_json_cost_no_other_row(small_tokenizer_dir):
    Path("rows.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n{"text": "c"}\n')
    source = {"path": "rows.jsonl", "weight": 2.0}
    store = build(small_tokenizer_dir, "auto", sources=[source], on_bad_row="skip", template=None)
    assert (store.num_samples, store.meta.counts["bad"]) == (6, 1)


def test_it_runs_in_a_build_alone(small_tokenizer_dir, capsys):
    write(RIDDLES)
    text = "from pathlib import Path\n\nPath('ran').touch()\n\n\ndef rows(row):\n    return {'text': row['riddle']}\n"
    Path("own.py").write_text(text)
    config = Config(
        model=ModelConfig(name=str(small_tokenizer_dir)),
        data=DataConfig.model_validate({"name": "d", "sources": [{"path": "rows.jsonl", "format": "own.py:rows"}]}),
    )
    with pytest.raises(SecurityError):
        require_no_code(config)
    require_no_code(config.model_copy(update={"data": DataConfig.model_validate({"sources": ["rows.jsonl"]})}))
    refuse_early(config.data, config.model.name)
    assert not Path("ran").exists()
    command = ["data", "build", "rows.jsonl", "--format", "own.py:rows", "--tokenizer", str(small_tokenizer_dir)]
    assert main([*command, "--name", "d"]) == 0
    assert "own.py:rows converts its rows, and runs as code" in " ".join(capsys.readouterr().err.split())
    Path("ran").unlink()
    assert main(["data", "show", "d"]) == 0
    assert not Path("ran").exists()


# the converters of examples/formats

GLAIVE = (
    'USER: Weather?\n\n\nASSISTANT: <functioncall> {"name": "get", "arguments": \'{"city": "Rome"}\'} '
    '<|endoftext|>\n\n\nFUNCTION RESPONSE: {"sky": "blue"}\n\n\nASSISTANT: Sunny. <|endoftext|>\n\n\n'
)
FLAT = {"name": "get", "description": "asks", "parameters": {"city": {"type": "str"}}}
XLAM = {"query": "Weather?", "answers": [{"name": "get", "arguments": {"city": "Rome"}}], "tools": [FLAT]}


def said(role: str, *parts: Row) -> Row:
    return {"role": role, "parts": list(parts)}


HI, CALLED = {"text": "Weather?"}, {"functionCall": {"name": "get", "args": {"city": "Rome"}}}
ANSWERED = {"functionResponse": {"name": "get", "response": {"sky": "blue"}}}
# the converter, a row, its messages and its tools
READ: dict[str, tuple[str, Row, tuple[Message, ...], tuple[Any, ...]]] = {
    "xlam": ("xlam", XLAM, (U, CALL), (TOOL,)),
    "xlam as texts": ("xlam", {k: v if k == "query" else json.dumps(v) for k, v in XLAM.items()}, (U, CALL), (TOOL,)),
    "xlam with a schema": ("xlam", XLAM | {"tools": [TOOL], "system": "You help."}, (HELP, U, CALL), (TOOL,)),
    "glaive": (
        "glaive",
        {"system": "SYSTEM: You help, with access to the following functions. Use them if required -\n"
                   f"{json.dumps(NAMED, indent=1)}\n", "chat": GLAIVE},
        (HELP, U, CALL, RESULT, A), (TOOL,),
    ),
    "glaive without tools": (
        "glaive",
        {"system": "SYSTEM: You help.\n\n", "chat": "USER: Weather?\n\n\nASSISTANT: Sunny. <|endoftext|>"},
        (HELP, U, A), (),
    ),
    "glaive without a prompt": (
        "glaive", {"chat": "USER: Weather?\nASSISTANT: Sunny."}, (Message("system", ""), U, A), (),
    ),
    "gemini": (
        "gemini",
        {"systemInstruction": {"role": "system", "parts": [{"text": "You help."}]},
         "contents": [said("user", HI), said("model", CALLED), said("user", ANSWERED),
                      said("model", {"text": "It is blue.", "thought": True}, {"text": "Sunny."})],
         "tools": [{"functionDeclarations": [{"name": "get", "description": "asks", "parameters": {
             "type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]}}]}]},
        (HELP, U, CALL, replace(RESULT, name="get"), replace(A, reasoning="It is blue.")), (TOOL,),
    ),
    "gemini in snake case": (
        "gemini",
        {"contents": json.dumps([
            said("user", {"text": "Wea"}, {"text": "ther?"}),
            said("model", {"function_call": {"name": "get", "args": {"city": "Rome"}}}),
            said("function", {"function_response": {"name": "get", "response": "blue"}}),
            said("model", {"text": "Sunny."})]),
         "tools": [{"function_declarations": [NAMED]}]},
        (U, CALL, Message("tool", "blue", name="get"), A), (TOOL,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_the_row_of_another_system_becomes_a_conversation(name):
    converter, row, messages, tools = READ[name]
    (found,), bad, _ = read([row], f"{EXAMPLES / converter}.py:rows")
    assert (found.messages, found.tools, bad) == (messages, tools, [])


@pytest.mark.parametrize(
    ("written", "wanted", "is_required"),
    [
        ("int, optional", {"type": "integer"}, False),
        ("Optional[float]", {"type": "number"}, False),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}, True),
        ("List[List[int]]", {"type": "array"}, True),
        ("Dict[str, int]", {"type": "object"}, True),
        ("Union[int, str]", {"description": "(type: Union[int, str])"}, True),
    ],
)
def test_types_of_xlam_become_those_of_json(written, wanted, is_required):
    row = XLAM | {"tools": [{"name": "get", "parameters": {"x": {"type": written}}}]}
    (found,), _, _ = read([row], f"{EXAMPLES}/xlam.py:rows")
    schema = {"type": "object", "properties": {"x": wanted}, "required": ["x"] * is_required}
    assert found.tools[0]["function"]["parameters"] == schema


# the converter, a row, and what its refusal names
REFUSED: list[tuple[str, Row, str]] = [
    ("xlam", XLAM | {"answers": "[]"}, "answers is empty"),
    ("xlam", XLAM | {"tools": "get(city)"}, "tools is not valid JSON"),
    ("glaive", {"chat": "USER: a\nASSISTANT: <functioncall> get(Rome)"}, "chat, turn 2 is not valid JSON"),
    ("glaive", {"chat": "USER: a\nASSISTANT: b <|endoftext|> c <|endoftext|>"}, "chat, turn 2 goes on"),
    ("glaive", {"chat": "USER: a\nFUNCTION RESPONSE: b\nASSISTANT: c"}, "messages[2] is a tool result without a call"),
    ("gemini", {"contents": [said("user", {"inlineData": {"mimeType": "x"}})]}, "contents[0].parts[0] (inlineData)"),
    ("gemini", {"contents": [said("user", {"executableCode": {}})]}, "contents[0].parts[0]"),
    ("gemini", {"contents": [said("user", HI, ANSWERED)]}, "messages[0].content[1] (tool_result) is out of order"),
    ("gemini", {"contents": [said("user", CALLED)]}, "messages[0].content is a list in a user turn"),
    ("gemini", {"systemInstruction": {"parts": [HI, CALLED]}, "contents": [said("user", HI)]}, "systemInstruction"),
]  # fmt: skip


@pytest.mark.parametrize(("converter", "row", "named"), REFUSED)
def test_what_such_a_row_cannot_mean_is_named(converter, row, named):
    found, (bad,), _ = read([READ[converter][1], row], f"{EXAMPLES / converter}.py:rows")
    assert len(found) == 1
    assert bad.startswith("rows.jsonl:2: ")
    assert named in bad


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
MESSAGE = ("message_id", "parent_id", "role", "text", "rank", "deleted")
OASST = f"{EXAMPLES}/oasst.py:rows"


def messages(tree: list[tuple[Any, ...]]) -> list[Row]:
    return [dict(zip(MESSAGE, node, strict=True)) for node in tree]


def test_each_path_to_a_last_reply_is_a_conversation_and_each_message_is_learned_once():
    conversations, bad, notes = read(messages(TREE), OASST, system="s")
    assert [[(m.content, m.train) for m in c.messages[1:]] for c in conversations] == [
        [("question", None), ("best", None), ("and then?", None), ("then this", None)],
        [("question", False), ("best", False), ("and then?", False), ("or that", None)],
        [("question", False), ("second", None)],
        [("question", False), ("unranked", None)],
    ]
    assert [c.messages[0].content for c in conversations] == ["s"] * 4
    assert [c.origin.row_number for c in conversations] == [6, 7, 1, 4]
    assert bad == []
    left = "1 deleted, 2 questions without a reply, 2 whose parent is deleted or not in the data"
    assert notes == [f"oasst.py:rows left out 5 rows: {left}"]


def test_bad_messages_are_named_and_the_rest_is_threaded():
    tree = [
        ("q", None, "prompter", "t", None, False),
        ("a", "q", "assistant", None, None, False),
        ("q", None, "prompter", "again", None, False),
        ("b", "q", "judge", "t", None, False),
        ("c", "q", "assistant", "reply", "first", False),
        ("d", "q", "assistant", "reply", None, False),
    ]
    (found,), bad, _ = read(messages(tree), OASST)
    assert found.messages[-1].content == "reply"
    named = ["2: text is None", "3: message_id 'q' is given twice; first at rows.jsonl:1", "4: role", "5: rank is"]
    assert all(told.startswith(f"rows.jsonl:{start}") for told, start in zip(bad, named, strict=True))


def test_circles_are_left_out_and_deep_trees_need_no_recursion():
    circle = [("q", None, "prompter", "t", None, False), ("x", "y", "assistant", "t", None, False)]
    circle += [("y", "x", "prompter", "t", None, False), ("a", "q", "assistant", "t", None, False)]
    found, _, notes = read(messages(circle), OASST)
    assert (len(found), notes) == (1, ["oasst.py:rows left out 2 rows: 2 whose parent is deleted or not in the data"])
    deep: list[tuple[Any, ...]] = [
        (str(n), str(n - 1) if n else None, ("prompter", "assistant")[n % 2], "t", None, False) for n in range(5000)
    ]
    assert [len(each.messages) for each in read(messages(deep), OASST)[0]] == [5000]


def test_whole_trees_make_the_same_conversations():
    def message(node: tuple[Any, ...]) -> Row:
        own = {name: value for name, value in zip(MESSAGE, node, strict=True) if name != "parent_id"}
        return own | {"replies": [message(child) for child in TREE if child[1] == node[0]]}

    roots = [{"tree_state": "ready", "prompt": message(node)} for node in TREE if node[1] is None]
    flat = read(messages(TREE), OASST)[0]
    assert [each.messages for each in read(roots, OASST)[0]] == [each.messages for each in flat]
    torn = {"prompt": roots[0]["prompt"] | {"message_id": "z", "replies": [5]}}
    assert read([*roots, torn], OASST)[1][-1].startswith("rows.jsonl:3: message_id is None")


FOREIGN = {
    "xlam": [XLAM], "glaive": [{"chat": GLAIVE}], "gemini": [READ["gemini"][1]], "oasst": messages(TREE),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("named", [True, False])
def test_rows_of_other_systems_name_their_converter(name, named, small_tokenizer_dir):
    write(FOREIGN[name])
    with pytest.raises((FlatoutError, ValueError)) as caught:
        build(small_tokenizer_dir, name if named else "auto")
    fix = f"examples/formats/{name}.py:rows"
    if isinstance(caught.value, FlatoutError):
        assert caught.value.exit_code == 3
        assert caught.value.fixes[0].settings == {"data.sources": [{"path": "rows.jsonl", "format": fix}]}
    Path("examples").symlink_to(EXAMPLES.parent)
    assert build(small_tokenizer_dir, fix, template="qwen3").num_samples > 0
