"""`flatout data show --html`: which tokens are trained, turn by turn, and nothing of a row becomes markup."""

from __future__ import annotations

import html
import json
import re

from flatout.cli.main import main
from flatout.data.token_store import TokenStore
from flatout.view.samples import split_turns


def plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def test_trained_and_context_tokens_are_those_of_the_store(data_set):  # type: ignore[no-untyped-def]
    page = data_set.page.read_text()
    samples = page.split('<article class="sample">')[1:]
    assert len(samples) == 5
    turns = re.findall(r'<div class="turn( trained)?">(.*?)</div>', samples[0], re.DOTALL)
    assert len(turns) >= 2
    trained = [plain(piece) for piece in re.findall(r'<span class="t">(.*?)</span>', samples[0], re.DOTALL)]
    assert trained == ["Yes.<|im_end|>"]
    assert [bool(mark) for mark, _ in turns] == [plain("".join(trained)) in plain(turn) for _, turn in turns]
    context = "".join(plain(piece) for piece in re.findall(r'<span class="k">(.*?)</span>', samples[0], re.DOTALL))
    assert "tab\there\nnext </script><script>alert(1)</script>" in context
    assert "U+202Etxet" in context
    assert page.count("<script>") == 1
    assert "\u202e" not in page


def test_truncation_sizes_and_packing_are_told(data_set):  # type: ignore[no-untyped-def]
    page, store = data_set.page.read_text(), TokenStore.open(data_set.store)
    second = page.split('<article class="sample">')[2]
    assert ">truncated<" in second
    assert f"300 tokens, {int(store.num_label_tokens[1])} trained" in second
    assert "rows were truncated to 300 tokens" in page
    assert f"{int(store.lengths.sum()):,}" in page
    # every sample of the first step is a block, above and below
    lane = re.search(r"data-lanes='([^']*)'", page)
    assert lane is not None
    for style in ("packed", "padded"):
        assert sum(map(len, json.loads(lane[1])[style])) == 32


def test_turns_are_cut_after_their_end_also_inside_a_piece():
    pieces = [("<s>user a</e>\n<s>bot ", False), ("b</e>", True), ("\n<s>user c</e>\n", False), ("left", False)]
    assert list(split_turns(pieces, "</e>")) == [
        [("<s>user a</e>\n", False)],
        [("<s>bot ", False), ("b</e>", True), ("\n", False)],
        [("<s>user c</e>\n", False)],
        [("left", False)],
    ]
    assert list(split_turns(pieces, "")) == [pieces]
    assert list(split_turns([], "</e>")) == []


def test_a_damaged_report_is_said_and_a_wrong_option_is_one_sentence(
    data_set,
    tmp_path,
    capsys,  # type: ignore[no-untyped-def]
):
    words = ["data", "show", "chats", "--root", str(data_set.root)]
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "x.html")]) == 2
    path = data_set.store / "report.json"
    kept = path.read_bytes()
    for damaged in (b"[]", b'{"notes": 3, "rows": {}}', kept[:50]):
        path.write_bytes(damaged)
        assert main([*words, "--html", "--out", str(tmp_path / "x.html")]) == 0
        shown = (tmp_path / "x.html").read_text()
        assert f"{path}: " in shown
        assert "The first" in shown
        capsys.readouterr()
        assert main(words) == 0
        assert f"not known, {path}: ".replace(" ", "") in "".join(capsys.readouterr().out.split())
    path.write_bytes(kept)
    assert main([*words, "--html", "--out", str(tmp_path / "x.html")]) == 0
    assert f"{path}: " not in (tmp_path / "x.html").read_text()
    assert json.loads(kept)["notes"]
