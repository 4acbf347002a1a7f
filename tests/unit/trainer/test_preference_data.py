"""From a file of pairs to a trained step; objectives refuse data sets of another kind before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.data.token_store import TokenStore
from flatout.errors import DataError
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.track.run_log import read_run
from flatout.trainer.eval_prompts import choose_rows
from flatout.trainer.planned_run import PlannedRun, open_and_plan

EXAMPLE = Path(__file__).parents[3] / "examples" / "dpo.py"
PAIRS = [
    {
        "prompt": f"What is {k} and {k}? " * (k % 3 + 1),
        "chosen": f"It is {2 * k}. " * (k % 4 + 1),
        "rejected": "No idea.",
    }
    for k in range(24)
]
JUDGED = [{"prompt": p["prompt"], "completion": p["chosen"], "label": k % 3 > 0} for k, p in enumerate(PAIRS)]


@pytest.fixture
def plan(tiny, tmp_path):
    def run(rows: list[dict[str, Any]], source: dict[str, Any] | None = None, **sections: Any) -> PlannedRun:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"name": "d", "root": str(tmp_path / "data"), "sources": [{"path": str(file), **(source or {})}]}
        config = tiny.config(tmp_path / "run", data=data, **sections)
        return open_and_plan(config, Reporter(), Rank())

    return run


def test_an_objective_refuses_data_of_another_kind(plan, tiny, tmp_path):
    with pytest.raises(DataError, match=r"'d' has 24 pairs; objective cross_entropy") as refused:
        plan(PAIRS)
    assert plan(PAIRS, **refused.value.fixes[0].settings).plan.num_units == 24
    assert plan(PAIRS, objective="simpo").plan.num_units == 24
    chosen = plan(PAIRS, {"columns": {"completion": "chosen"}})
    assert (chosen.plan.num_units, chosen.store.unit_offsets) == (24, None)
    with pytest.raises(DataError, match=r"objective simpo needs a chosen and a rejected answer .*120 of 120 have one"):
        open_and_plan(tiny.config(tmp_path / "run", objective="simpo"), Reporter(), Rank())
    with pytest.raises(DataError, match=r"'d' has 8 answers whose label is 0, and objective cross_entropy would learn"):
        plan(JUDGED)
    assert plan([row for row in JUDGED if row["label"]]).plan.num_units == 16


def test_held_out_pairs_stay_whole(plan):
    planned = plan(PAIRS, objective="simpo", eval={"fraction": 0.25})
    held_out = planned.eval_sets[0].step.sample_ids
    assert len(held_out) == 12
    assert {sample ^ 1 for sample in held_out} == set(held_out)


def test_evaluations_show_no_answer_to_avoid_as_reference(plan):
    store = plan(PAIRS, objective="simpo").store
    answers = [ids[mask].tolist() for ids, mask in (store.sample(index).pair for index in range(48))]
    for held_out in (range(48), range(1, 48), [4, 5]):
        rows, _ = choose_rows([(store, held_out)], 400)
        assert rows
        for _, reference in rows:  # the end of turn may be cut off
            assert any(answer[: len(reference)] == reference.tolist() for answer in answers[0::2])
            assert not any(answer[: len(reference)] == reference.tolist() for answer in answers[1::2])
    with pytest.raises(DataError, match="11 answers whose label is 0"):  # it is built before it is refused
        plan([row | {"label": k == 7} for k, row in enumerate(JUDGED[:12])])
    judged = TokenStore.open(store.folder)
    rows, _ = choose_rows([(judged, range(12))], 400)
    assert len(rows) == 1


def test_a_loss_of_ones_own_builds_on_preference(tiny, tmp_path, capfd):
    """The example of the page: flatout computes the reference, so the first step's ratios are 0 and its loss is 1."""
    hinge = EXAMPLE.with_name("hinge.py")
    page = (EXAMPLE.parents[1] / "docs" / "objectives.md").read_text()
    assert hinge.read_text().partition("\n\n")[2] in page
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    config = tiny.config(
        tmp_path / "run", data={"name": "d", "root": str(tmp_path), "sources": [{"path": f"{tmp_path}/pairs.jsonl"}]},
        objective={"path": f"{hinge}:Hinge", "beta": 0.2}, model={"precision": "fp64"},
        batch={"samples_per_step": 24, "max_steps": 3}, optim={"lr": 1e-3},
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    first, *later = read_run(tmp_path / "run").steps
    assert first.loss == pytest.approx(1, rel=1e-12)
    assert first.metrics["rewards/margins"] == pytest.approx(0, abs=1e-12)
    # all pairs are within the hinge, where the mean loss is 1 minus the mean margin
    for step in later:
        assert step.loss == pytest.approx(1 - step.metrics["rewards/margins"], rel=1e-9)
        assert step.loss < 1
    # a tiny model takes far greater rates than others
    for lr, is_told in (("0.1", True), ("5e-6", False)):
        assert main(["plan", str(tmp_path / "run.yaml"), f"optim.lr={lr}"]) == 0
        said = " ".join(capfd.readouterr().out.split())
        assert ("losses over pairs usually take optim.lr=5e-06, not 0.1" in said) is is_told
        assert ("losses over pairs" in said) is is_told


class Told(Reporter):
    """Keeps the lines of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def stage(self, name: str, text: str) -> None:
        self.lines.append(f"{name}: {text}")


REPEATED: dict[str, tuple[Callable[[str, int], dict[str, Any]], dict[str, Any]]] = {
    "pairs": (lambda p, k: {"prompt": p, "chosen": f"yes {k}", "rejected": f"no {k}"}, {"objective": "simpo"}),
    "kto": (lambda p, k: {"prompt": p, "completion": f"yes {k}", "label": k % 2 > 0}, {"objective": "kto"}),
    "ranked": (
        lambda p, k: {"prompt": p, "answers": [f"a {k}", f"b {k}"], "scores": [2, 1]}, {"objective": "simpo"},
    ),
    "chats": (
        lambda p, k: {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": f"yes {k}"}]},
        {"eval": {"split_by": "prompt"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REPEATED)
def test_rows_with_one_prompt_are_held_out_together(tiny, tmp_path, form):
    make, sections = REPEATED[form]
    asked = [f"Question {number % 8}?" for number in range(48)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(make(one, k)) + "\n" for k, one in enumerate(asked)))
    data = {"name": "d", "root": str(tmp_path / "data"), "sources": [{"path": str(file)}]}

    def held_out(**more: Any) -> tuple[set[str], set[str], list[str]]:
        told = Told()
        wanted = {**sections, "eval": {"fraction": 0.25, **sections.get("eval", {}), **more}}
        planned = open_and_plan(tiny.config(tmp_path / "run", data=data, **wanted), told, Rank())
        chosen = planned.eval_sets[0].step.sample_ids
        sides = [{asked[planned.store.rows[k] - 1] for k in range(planned.store.num_samples) if (k in chosen) is side}
                 for side in (True, False)]  # fmt: skip
        return sides[0], sides[1], told.lines

    evaluated, trained, lines = held_out()
    assert len(evaluated) == 2
    assert not evaluated & trained
    assert any("rows with one prompt stay on one side" in line for line in lines)
    by_row = held_out(split_by="row")
    assert by_row[0] & by_row[1]
    assert any("begin with a question that is trained on, too; eval.split_by=prompt" in line for line in by_row[2])
    file.write_text("".join(json.dumps(make("one question", k)) + "\n" for k in range(4)))
    with pytest.raises(DataError, match="4 rows have one prompt and cannot be split") as refused:
        held_out()
    assert refused.value.fixes[0].settings == {"eval.split_by": "row"}
