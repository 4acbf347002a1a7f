"""A round on disk: its journal after a crash, and the store of the answers to train."""

from __future__ import annotations

import math

import numpy as np

from flatout.data.token_store import StoreMeta
from flatout.rollout.advantages import make_advantages
from flatout.rollout.collect import Group, Journal, write_round
from flatout.rollout.sampler import Completion

PROMPTS = ((7, 8), (9,), (6, 5, 4))


def groups():
    """Three groups of two answers; the second has no signal, and one answer of the third no score."""
    totals = ((1.0, 0.0), (2.0, 2.0), (5.0, None))
    return [
        Group(
            place, 10 + place,
            tuple(Completion((20 + at, *range(30, 30 + place), 2), (-0.5, *[-1.5] * place, -0.25), "stop")
                  for at in range(2)),
            tuple((total, at / 2) for at, total in enumerate(own)), own,
        )
        for place, own in enumerate(totals)
    ]  # fmt: skip


def opened(folder, rank):
    journal = Journal(folder, {"seed": "one"}, rank)
    journal.open()
    return journal


def test_a_journal_goes_on_behind_what_a_crash_left(tmp_path):
    first, second, third = groups()
    one, other = (opened(tmp_path, rank) for rank in (0, 1))
    unscored = Group(first.place, first.prompt, first.answers)
    one.add(unscored)
    other.add(second)
    assert one.groups() == {0: unscored, 1: second}
    other.add(first)
    one.close()
    other.close()
    with (tmp_path / "rank-1.journal").open("a") as file:
        file.write("[2, 12, [[[20")
    again = opened(tmp_path, 1)
    assert again.groups() == {0: first, 1: second}, "scored ones replace others, whatever rank scored them"
    again.add(third)
    again.close()
    only = opened(tmp_path, 0)
    assert only.groups() == {0: first, 1: second, 2: third}
    only.close()
    file = tmp_path / "rank-1.journal"
    file.write_bytes(file.read_bytes().replace(b"-0.25", b"-0.75", 1))  # of the line of the second
    assert only.groups() == {0: first, 2: third}, "a damaged line is sampled again"
    assert only.drop_others() == ""
    assert only.groups() == {0: first, 2: third}
    changed = Journal(tmp_path, {"seed": "other"}, 2)
    assert (changed.groups(), changed.drop_others()) == ({}, "seed"), "of whatever ranks they are"
    assert not [*tmp_path.iterdir()]


def test_the_store_of_a_round_has_what_is_trained(tiny, tmp_path):
    """Labels are all tokens of an answer, its end too, and none of its prompt; dropped answers count in ANSWERS."""
    totals = np.array([math.nan if one is None else one for group in groups() for one in group.totals])
    advantages = make_advantages(totals, np.array([2, 2, 2]), "mean")
    assert advantages.is_kept.tolist() == [True, True, False, False, False, False]
    meta = StoreMeta(name="round 1", tokenizer=str(tiny.model_dir), vocabulary_size=64, files=("rollouts",))
    store = write_round(tmp_path / "round", groups(), PROMPTS, advantages, meta, ["right", "short"], 64)
    assert store.token_ids.tolist() == [7, 8, 20, 2, 7, 8, 21, 2]
    assert store.loss_mask[:].tolist() == [False, False, True, True] * 2
    assert store.offsets.tolist() == [0, 4, 8]
    assert store.unit_offsets.tolist() == [0, 2]
    assert store.rows.tolist() == [11, 11]
    columns = {name: values.tolist() for name, values in store.extra.items()}
    assert columns == {
        "prefix_tokens": [1],
        "advantage": [0, 0, 0.5, 0.5, 0, 0, -0.5, -0.5],
        "sampler_logprob": [0, 0, -0.5, -0.25] * 2,
        # 5 scored answers, 2 of which are trained
        "answers": [2.5, 2.5],
        "reward": [1, 0],
        "ending": [0, 0],
        "reward_right": [1, 0],
        "reward_short": [0, 0.5],
    }
