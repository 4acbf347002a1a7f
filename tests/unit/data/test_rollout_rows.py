"""Sampled answers that a person brings: rows of groups, and stores written by hand, become the same columns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data import registry
from flatout.data.build import open_or_build
from flatout.data.columns import Column
from flatout.data.store_writer import new_store
from flatout.data.token_store import StoreMeta
from flatout.errors import DataError

Row = dict[str, Any]


def answer(*token_ids: int, **more: Any) -> Row:
    return {"token_ids": [*token_ids], "logprobs": [-0.5 * k for k in range(len(token_ids))], **more}


ROWS: list[Row] = [
    {"prompt_ids": [7, 8, 9], "answers": [answer(20, 21, reward=1), answer(22, reward=0.0), answer(20, 21, reward=1)]},
    {"prompt_ids": [5, 6], "answers": [answer(30, 31, 32, loss_mask=[1, 0, 1], reward=0.5)]},
    {"answers": [answer(7, 8, 40, labels=[-100, -100, 40], reward=2)]},
]
ADVANTAGES = [1, [-2.5], [3, 4]], [[1, None, -1]], [[None, None, 7]]


def with_advantages(rows: list[Row]) -> list[Row]:
    return [
        row | {"answers": [one | {"advantage": a} for one, a in zip(row["answers"], given, strict=True)]}
        for row, given in zip(rows, ADVANTAGES, strict=True)
    ]


GOOD = with_advantages(ROWS)[0]


@pytest.fixture
def build(tmp_path, small_tokenizer_dir):
    def build(rows: list[Row], **settings: Any) -> Any:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"name": "d", "root": tmp_path / "data", "sources": [str(tmp_path / "rows.jsonl")], "num_procs": 1}
        return open_or_build(DataConfig.model_validate(values | settings), str(small_tokenizer_dir))

    return build


def test_a_group_is_a_unit_whose_sampled_tokens_have_their_values(build):
    store = build(with_advantages(ROWS))
    samples = [store.sample(i, ["advantage", "sampler_logprob", "reward"]) for i in range(store.num_samples)]
    expected = [
        ([7, 8, 9, 20, 21], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, -0.5], 1),
        ([7, 8, 9, 22], [0, 0, 0, 1], [0, 0, 0, -2.5], [0, 0, 0, 0], 0),
        ([7, 8, 9, 20, 21], [0, 0, 0, 1, 1], [0, 0, 0, 3, 4], [0, 0, 0, 0, -0.5], 1),
        ([5, 6, 30, 31, 32], [0, 0, 1, 0, 1], [0, 0, 1, 0, -1], [0, 0, 0, 0, -1], 0.5),
        ([7, 8, 40], [0, 0, 1], [0, 0, 7], [0, 0, -1], 2),
    ]
    for sample, (ids, labels, advantages, logprobs, reward) in zip(samples, expected, strict=True):
        assert [sample.token_ids.tolist(), sample.loss_mask.tolist()] == [ids, [bool(label) for label in labels]]
        assert sample.columns["advantage"].tolist() == advantages
        assert sample.columns["sampler_logprob"].tolist() == logprobs
        assert sample.columns["reward"] == reward
    assert store.unit_offsets.tolist() == [0, 3, 4, 5]
    assert store.extra["prefix_tokens"].tolist() == [2, 1, 1]  # the last token of a prompt predicts a label


def test_a_group_is_left_out_whole_and_counted(build):
    rows = [*with_advantages(ROWS), *with_advantages(ROWS)[1:]]
    longer = [*GOOD["answers"], answer(*range(20, 40), reward=1, advantage=1)]
    rows.insert(0, GOOD | {"answers": longer})
    store = build(rows, max_tokens=10, too_long="drop", dedupe="exact")
    assert (store.meta.counts["groups"], store.meta.counts["lost_groups"], store.meta.counts["equal_rows"]) == (3, 1, 2)
    assert store.extra["advantage"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, -2.5, 0, 0, 0, 3, 4, 0, 0, 1, 0, -1, 0, 0, 7]


BAD: dict[str, tuple[Row, str]] = {
    "no log-probabilities": ({"logprobs": None}, "answers[1]: has no logprobs; write the sampler's"),
    "too few": ({"logprobs": []}, "answers[1]: logprobs has 0 values, but the answer 1 tokens"),
    "probabilities": ({"logprobs": [0.7]}, "answers[1]: logprobs[0] is 0.7; expected the natural logarithm"),
    "not known": ({"logprobs": [-9999.0]}, "answers[1]: logprobs[0] is -9999; expected the natural logarithm"),
    "null": ({"logprobs": [None]}, "answers[1]: logprobs[0] is null, not a finite number"),
    "nothing it is worth": ({"reward": None, "advantage": None}, "answers[1]: has neither reward nor advantage"),
    "a reward of one alone": ({"reward": None}, "only one of answers[0] and answers[1] has reward"),
    "advantages of others": ({"advantage": [1, 2]}, "answers[1]: advantage has 2 values, but the answer 1 tokens"),
    "no token": ({"token_ids": [-1]}, "answers[1]: token_ids[0] is -1; token ids start at 0"),
    "another tokenizer's": ({"token_ids": [5000]}, "token id 5000 at position 3 is outside 0.."),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_an_answer_is_named(build, name):
    change, said = BAD[name]
    answers = [one | (change if index == 1 else {}) for index, one in enumerate(GOOD["answers"])]
    assert build([GOOD]).num_samples == 3
    with pytest.raises(DataError) as refused:
        build([GOOD, GOOD | {"answers": answers}])
    assert f"rows.jsonl:2: {said}" in refused.value.text


def test_rows_differ_in_what_they_have(build):
    assert "advantage" not in build(ROWS).extra
    for rows, said in (([GOOD, ROWS[0]], "has no advantage, but"), ([ROWS[2], {"answers": []}], "answers is empty")):
        with pytest.raises(DataError, match=said):
            build(rows)
    unlabelled = {"answers": [answer(7, 8, reward=1)]}
    with pytest.raises(DataError, match="nothing says which tokens were sampled"):
        build([unlabelled])
    with pytest.raises(DataError, match="too_long=truncate would keep a part of an answer"):
        build([GOOD], too_long="truncate")


def test_a_store_written_by_hand_is_opened_and_shown_as_it_is(tmp_path, small_tokenizer_dir, build, capsys):
    built, root = build(with_advantages(ROWS)), tmp_path / "own"
    columns = {name: Column(built.columns[name].dtype, built.columns[name].per, "own") for name in built.extra}

    def write(name: str, shift: float = 0.0) -> Any:
        with new_store(registry.built_dir(root, name), 400, columns=columns) as writer:
            values = {name: np.array(own) for name, own in built.extra.items()}
            values["reward"] = values["reward"] + np.float32(shift)
            ids = np.asarray(built.token_ids, np.int32)
            sizes = np.diff(built.unit_offsets)
            writer.append(ids, built.loss_mask[:], built.lengths, built.files, built.rows, sizes, values)
            writer.finish(StoreMeta(name, tokenizer=str(small_tokenizer_dir)))
        return open_or_build(DataConfig(name=name, root=root), str(small_tokenizer_dir))

    registry.built_dir(root, "x").parent.mkdir(parents=True)
    one, same, other = write("round-0"), write("round-1"), write("round-2", 0.5)
    assert one.hashes.tolist() == built.hashes.tolist()
    assert one.meta.fingerprint == same.meta.fingerprint != other.meta.fingerprint
    assert main(["data", "show", "round-0", "-n", "5", "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "rewards: mean 0.9" in shown
    assert "reward 0.5)" in shown
    assert not any(word in shown for word in ("missing", "None", "again", "report.json"))
