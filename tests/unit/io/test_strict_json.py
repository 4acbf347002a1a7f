import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.io.json_file import JSONSyntaxError, parse_json

BAD = [
    ('{"a": 1 "b": 2}', 1, 9, "expected ',' or '}'"),
    ('{"a": [1 2]}', 1, 10, "expected ',' or ']'"),
    ('{"a": "x}", "b": [{}, {}] "c"}', 1, 27, "expected ',' or '}'"),
    ('{"a": 1', 1, 8, "the JSON ends while parsing an object"),
    ('{"a" 1}', 1, 6, "expected ':'"),
    ("{'a': 1}", 1, 2, "expected double quotes; single quotes are Python's, not JSON's"),
    ('{\n "a": 1,\n "b": tru\n}', 3, 7, "expected value"),
    ('{"a": "open}', 1, 7, "the JSON ends while parsing a string"),
    ('{"a": "tab\there"}', 1, 11, r"control character (\u0000-\u001F) found while parsing a string"),
    ('{"a": 1}{"a": 2}', 1, 9, "trailing characters"),
    ('{"a": 1, "b": 2, "a": 3}', 1, 18, 'key "a" is given twice in one object'),
    ('{"t": "NaN is fine here",\n "a": NaN}', 2, 7, "NaN is not valid JSON; write null or a number"),
    ('{"a": -Infinity}', 1, 7, "-Infinity is not valid JSON; write null or a number"),
    ("[" * 100_000, 1, 1, "nested too deeply"),
    (
        '{"a": ' + "9" * 5000 + "}",
        1,
        1,
        "exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
    ),
    ("", 1, 1, "the JSON ends while parsing a value"),
]


@pytest.mark.parametrize(("text", "line", "column", "what"), BAD)
def test_errors_name_line_and_column(text, line, column, what):
    with pytest.raises(JSONSyntaxError) as caught:
        parse_json(text)
    assert (caught.value.line, caught.value.column, caught.value.what) == (line, column, what)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(JSON_VALUES, st.booleans())
def test_every_value_comes_back_unchanged(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only)) == value


@settings(max_examples=150, deadline=None)
@given(JSON_VALUES, st.integers(min_value=0), st.sampled_from(',:}]{["x'))
def test_damaged_text_is_parsed_as_python_does_or_named_with_its_place(value, at, put):
    text = json.dumps(value)
    at %= len(text) + 1
    text = text[:at] + put + text[at + 1 :]
    repeats: list[bool] = []

    def note_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeats.append(len(dict(pairs)) != len(pairs))
        return dict(pairs)

    try:
        wanted = json.loads(text, object_pairs_hook=note_repeats)
    except json.JSONDecodeError as error:
        place = (error.lineno, error.colno)
    else:
        if not any(repeats):
            assert parse_json(text) == wanted
            return
        place = None
    with pytest.raises(JSONSyntaxError) as caught:
        parse_json(text)
    if place is None:
        assert caught.value.what.endswith("is given twice in one object")
    elif not any(repeats):  # what comes first in the text is told first
        assert (caught.value.line, caught.value.column) == place
