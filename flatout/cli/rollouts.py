"""`flatout rollouts`: the rounds of a run, and the answers of one with their rewards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flatout.cli.parser import COUNT
from flatout.cli.screen import WIDTH, aligned
from flatout.errors import UsageError
from flatout.io.redact import printable
from flatout.track.record import RatedAnswer
from flatout.track.run_log import read_run
from flatout.view.facts import round_rows
from flatout.view.open_runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("run", type=find_run, metavar="RUN", help="a run of rounds, in any state")
    parser.add_argument("--round", type=COUNT, metavar="N", help="show answers of this round, from 1")
    parser.add_argument("--best", type=COUNT, default=3, metavar="N", help="how many with the greatest rewards (3)")
    parser.add_argument("--worst", type=COUNT, default=3, metavar="N", help="how many with the least rewards (3)")


def run(args: argparse.Namespace) -> None:
    """Print the rounds, or answers of one. Raises UsageError for a run without rounds, or a round that it lacks."""
    log = read_run(args.run)
    if not log.rounds:
        raise UsageError(f"{args.run} has no rounds; rollout.rounds samples them")
    if args.round is None:
        print("\n".join(aligned(round_rows(log, "-"))))
        return
    from flatout.view.rollouts import distinct, read_round, why_gone  # imports the tokenizer

    record = next((one for one in log.rounds if one.round == args.round), None)
    if record and (why := why_gone(args.run, record)):
        answers: Sequence[RatedAnswer] = record.shown
        print(f"{why}; its record has {len(answers)} of {record.num_answers:,} answers")
    else:
        answers = read_round(args.run, args.round).answers
    ends = {"best": distinct(answers, args.best), "worst": distinct(answers[::-1], args.worst)}
    if answers and answers[0].reward is None:
        ends = {"some answers": distinct(answers, args.best + args.worst)}
    for title, some in ends.items():
        if some:
            print("\n".join([f"{f' {title} of round {args.round} ':=^{WIDTH}}", *map(_answer, some)]))


def _answer(one: RatedAnswer) -> str:
    return f"--- {one.scores}\n{printable(one.prompt.strip())}\n>>> {printable(one.answer.strip())}"
