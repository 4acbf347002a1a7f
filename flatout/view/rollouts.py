"""The answers of a round of rollouts, as its run folder has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from flatout.config.folders import round_folder
from flatout.config.objective import ADVANTAGE, REWARD
from flatout.config.read import load_config
from flatout.data.rollout_columns import ENDINGS
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import tokenizer_of
from flatout.errors import UsageError
from flatout.track.record import RatedAnswer, RoundRecord
from flatout.track.run_log import read_run

Answer = TypeVar("Answer", bound=RatedAnswer)
_BY_FUNCTION = f"{REWARD}_"


@dataclass(frozen=True, slots=True)
class TrainedAnswer(RatedAnswer):
    """An answer of a round with what it was trained as."""

    token_ids: tuple[int, ...]
    """Of the answer, a stop token included."""
    advantage: float
    """How much better it is than others: what each of its tokens was trained by."""
    ending: str
    """Why it ended: stop (a stop token), length (max_new_tokens) or positions (the model has no more)."""


@dataclass(frozen=True, slots=True)
class RoundAnswers:
    """The answers of one round that were trained, the greatest reward first."""

    round: int
    answers: tuple[TrainedAnswer, ...]

    def best(self, count: int = 5) -> tuple[TrainedAnswer, ...]:
        """Return the answers with the greatest rewards; of equal ones to a prompt, one."""
        return distinct(self.answers, count)

    def worst(self, count: int = 5) -> tuple[TrainedAnswer, ...]:
        """Return the answers with the least rewards, the least first; of equal ones to a prompt, one."""
        return distinct(self.answers[::-1], count)


def distinct(answers: Sequence[Answer], count: int) -> tuple[Answer, ...]:
    """Return the first of answers, and of equal ones to a prompt only one."""
    by_text: dict[tuple[str, str], Answer] = {}
    for one in answers:
        by_text.setdefault((one.prompt, one.answer), one)
    return tuple(by_text.values())[:count]


def why_gone(folder: Path, record: RoundRecord) -> str | None:
    """Return why the folder of a run lacks the answers of a round; None if it has them."""
    if not record.num_trained:
        return f"no answer of round {record.round} was trained: {record.why_untrained}"
    place = round_folder(folder, record.round)
    return None if place.exists() else f"{place} is missing: rollout.keep removes the answers of old rounds"


def read_round(folder: Path, number: int) -> RoundAnswers:
    """Read the answers of a round, from 1, of a run folder.

    Raises UsageError for a round that the run has not sampled, or of which no answer was trained, and DataError for a
    damaged one.
    """
    rounds = read_run(folder).rounds
    index = next((index for index, record in enumerate(rounds) if record.round == number), None)
    if index is None:
        known = f"; it has rounds {rounds[0].round} to {rounds[-1].round}" if rounds else ", which has none"
        raise UsageError(f"round {number} is not one of {folder}{known}")
    if why := why_gone(folder, rounds[index]):
        raise UsageError(f"{why}; run.log.rounds[{index}].shown has those of its record")
    config, place = load_config(folder / "config.yaml"), round_folder(folder, number)
    store, tokenizer = TokenStore.open(place), tokenizer_of(config.data, config.model.name)
    names = [name for name in store.extra if name.startswith(_BY_FUNCTION)]
    answers = []
    for index in np.argsort(-np.asarray(store.extra[REWARD]), kind="stable").tolist():
        sample = store.sample(index, [ADVANTAGE])
        ids, start = sample.token_ids, int(np.argmax(sample.loss_mask))
        prompt, answer = (str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:start], ids[start:]))
        values = {name.removeprefix(_BY_FUNCTION): float(store.extra[name][index]) for name in names}
        given = {name: None if np.isnan(value) else value for name, value in values.items()}
        trained = tuple(ids[start:].tolist()), float(sample.columns[ADVANTAGE][start])
        ending = ENDINGS[store.extra["ending"][index]]
        answers.append(TrainedAnswer(prompt, answer, float(store.extra[REWARD][index]), given, *trained, ending))
    return RoundAnswers(number, tuple(answers))
