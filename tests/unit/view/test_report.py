"""`flatout report`: a page of every state of a run, one sentence for everything else."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import run_start, step_record, write_synthetic_run

from flatout.cli.main import main
from flatout.config.folders import run_identity
from flatout.export.card import loss_svg
from flatout.track.record import Answer, AnswersRecord, HeldOutRecord, RatedAnswer, RoundRecord, RunEnd
from flatout.track.run_folder import RunFolderWriter
from flatout.track.run_log import read_run
from flatout.track.summary import summarize
from flatout.view.facts import changed_settings, headline, plan_rows
from flatout.view.page import page as whole_page
from flatout.view.report import run_fragment

VOID = {"meta", "br", "path", "rect", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps the text, and what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "action", "poster", "data")]
        self.loads = [value for value in self.loads if value[:1] != "#"]  # a place in the page
        assert not any(name.startswith("on") for name, _ in attrs)
        self.charts += [json.loads(str(value)) for name, value in attrs if name == "data-chart"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_synthetic_run(tmp_path_factory.mktemp("run") / "one", num_steps=300, num_ranks=4)


def report(*words: object) -> int:
    return main(["report", *map(str, words)])


def test_one_run_has_every_part_and_loads_nothing(folder, capsys):
    assert report(folder) == 0
    shown = capsys.readouterr().out
    out = folder / "report.html"
    assert str(out) in shown
    assert "MB" in shown
    text = out.read_text()
    page = Page(text)
    assert page.loads == []
    assert "url(" not in text
    assert "@import" not in text
    titles = (
        "Loss", "Token accuracy", "Throughput", "Model FLOPs utilization", "Memory", "Learning rate", "Gradient norm",
        "Step time", "Waiting for the slowest rank", "Sample lengths", "Packing", "Plan and run", "Events", "Settings",
    )  # fmt: skip
    for title in titles:
        assert title in page.texts, title
    # the shares of a step's parts, of which nothing is left over or counted twice
    names = ("data wait", "forward", "backward", "gradient sum", "checkpoint wait", "optimizer", "other")
    shares = [float(re.search(rf"{name} <b>([\d.]+)%", text)[1]) for name in names]  # type: ignore[index]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert shares[2] == max(shares)
    # every chart by step, by tokens and by time; the loss also on a log scale
    loss, *others = page.charts
    assert set(loss["axes"]) == {"step", "tokens", "time"}
    assert loss["log"]
    assert {"lines", "areas", "strips", "bars"} == {chart["kind"] for chart in others}
    assert "At sea level, water boils at 100 degrees Celsius" in page.text
    assert "lora.rank" in page.texts


def test_the_page_shows_the_figures_of_the_files(folder):
    log = read_run(folder)
    page = Page(whole_page("run", run_fragment(log)))
    best = min(log.evals, key=lambda one: one.eval_loss if one.is_best else 9)
    assert f"{log.steps[-1].loss:.4f}" in page.text
    assert f"{best.eval_loss:.4f}" in page.text
    assert f"{log.steps[-1].peak_memory_bytes / 2**30:.2f} GiB" in page.text
    of_plan = {name: actual for name, _, actual in plan_rows(log, summarize(log))}
    told = {name: value for name, value, _ in headline(summarize(log))}
    assert (of_plan["tokens"], of_plan["steps"]) == (told["Tokens"], told["Steps"]), "counted in one way"
    charts = ("GPU power", "GPU use")
    assert all(chart in page.text for chart in charts)
    unread = [replace(one, gpu_watts=None, gpu_use=None) for one in log.steps]
    assert not any(chart in run_fragment(replace(log, steps=unread)) for chart in charts)
    assert log.start is not None
    packed = log.start.plan.packing[0][0]
    padded = log.start.plan.padded[0][0]
    assert f"{sum(map(sum, packed)):,}" in page.texts
    assert f"{sum(len(batch) * max(batch) for batch in padded):,}" in page.texts


def test_rounds_over_the_run_and_the_newest_held_out_prompts_show_their_answers(tmp_path):
    folder = write_synthetic_run(tmp_path / "run", num_steps=20)
    writer = RunFolderWriter(folder)
    for index in range(20):
        rated = (RatedAnswer(f"asked in {index}", f"said in {index}", index / 8, {"exact": None, "length": 1.0}),)
        figures = dict.fromkeys(("num_unscored", "num_trained", "sample_s", "score_s", "wait_s"), 0)
        rates = dict.fromkeys(("mean_answer_tokens", "cut_share", "no_signal_share", "new_tokens_per_s"), 1.0)
        writer.on_round(RoundRecord(index, index + 1, None, 1, **figures, **rates, shown=rated))
        writer.on_round(HeldOutRecord(index, 0.25, 0, 1.0, shown=(), reward_stderr=0.125))
    text = " ".join(Page(whole_page("run", run_fragment(read_run(folder)))).text.split())
    assert re.findall("said in ([0-9]+)", text) == ["19", "15", "11", "7", "3", "0"]
    assert "reward 0.375 (exact -, length 1) asked in 3 answer said in 3" in text
    assert re.findall("Held-out prompts after step ([0-9]+) · mean reward 0.25 ± 0.12", text) == ["19"]


@pytest.fixture
def of_rounds(tmp_path):
    """Five rounds of four steps at one learning rate; the third round had nothing to learn from."""
    folder, rng = tmp_path / "policy", np.random.default_rng(0)
    writer = RunFolderWriter(folder)
    writer.on_start(run_start(folder, 20, 1, rng, {"name": "policy", "rollout.rounds": 5}))
    empty: dict[str, Any] = {"loss": None, "lr": None, "grad_norm": None, "token_accuracy": None, "metrics": {}}
    for step, held_out in zip(range(0, 21, 4), (0.25, 0.5, 0.75, None, 0.5, 0.5), strict=True):
        writer.on_round(HeldOutRecord(step, held_out, 8, 1.0, reward_stderr=held_out and 0.08))
        if step < 20:
            figures = (64, 0, 48 * (step != 8), 9.0 + step, 0.0, float(step == 8), 2.0, 1.0, 0.0, 900.0)
            writer.on_round(RoundRecord(step, step // 4 + 1, 0.1 + step / 100, *figures))
        for number in range(step + 1, min(step, 16) + 5):
            record = replace(step_record(number, 20, 1, rng, 1.0), lr=1e-5, metrics={"ratio": 1 / number, "clip": 0.0})
            writer.on_step(replace(record, **empty) if step == 8 else record)
    writer.on_end(RunEnd("complete", 0, 1.0))
    return folder


def test_a_run_of_rounds_is_judged_by_its_held_out_reward(of_rounds, capsys):
    summary = {"first": 0.25, "last": 0.5, "best": 0.75, "best_step": 8, "kind": "held_out", "stderrs": [0.08] * 3}
    for kind in ("html", "md", "json"):
        assert report(of_rounds, "--format", kind) == 0
    shown = capsys.readouterr().out
    for line in (
        "| Held-out reward | 0.5 ± 0.08 | 0.25 ± 0.08 at the first evaluation |",
        "| Best held-out reward | 0.75 ± 0.08 | after step 8 |",
        "| round | step | reward | held out | tokens | cut | no signal | new tok/s |",
        "| 2 | 4 | 0.14 | 0.5 ± 0.08 | 13 | 0.0% | 0.0% | 900 |",
        "| – | 20 | – | 0.5 ± 0.08 | – | – | – | – |",
        "| 8 | 0.75 ± 0.08 | best |",
    ):
        assert line in shown
    assert "got worse after step 8, 0.75 ± 0.08 to 0.5 ± 0.08" in shown
    assert json.loads(shown[shown.index("{\n") :])["runs"][0]["summary"]["evaluation"] == summary
    page = Page((of_rounds / "report.html").read_text())
    text = " ".join(page.text.split())
    assert "Held-out reward 0.5 ± 0.08 0.25 ± 0.08 at the first evaluation" in text
    first, *_ = (chart for chart in page.charts if chart["kind"] == "lines")
    assert [one["name"] for one in first["series"]] == ["held out", "round"], "not the loss, which says nothing"
    # bounds, and nothing of packing, before answers are there
    assert "tokens at most" in text
    assert "Training loss" not in shown + text
    assert "padding avoided" not in shown + text
    assert main(["runs", str(of_rounds.parent)]) == 0
    assert re.search(r"reward  eval  0.25    0.5 ± 0.08  0.75 @8 ", capsys.readouterr().out)
    assert main(["watch", str(of_rounds)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "held_out   0.25 ± 0.08 first, 0.5 ± 0.08 last, 0.75 ± 0.08 best, after step 8" in lines
    assert "held_out   step 20: reward 0.5 ± 0.08  8 answers" in lines
    assert "reward     0.1 first, 0.26 last" in lines
    # as the run printed them
    first = [line.split()[0] for line in lines[:3]]
    assert first == ["held_out", "round", "step"]
    svg = loss_svg(read_run(of_rounds))
    assert "reward by step" in svg
    assert "nan" not in svg


def test_rewards_are_worse_beyond_twice_the_error_of_their_difference(of_rounds):
    """That is 0.25 here for errors of 0.0884; a run of before they were recorded has none, and no such warning."""
    log = read_run(of_rounds)
    for stderr, is_told in ((0.085, True), (0.092, False), (None, False)):
        held_out = [replace(one, reward_stderr=one.reward and stderr) for one in log.held_out]
        assert ("got worse" in str(summarize(replace(log, held_out=held_out)).warnings)) == is_told


def test_equal_rewards_are_shown_without_an_error(of_rounds, capsys):
    writer = RunFolderWriter(of_rounds)
    writer.on_round(HeldOutRecord(21, 1.0, 8, 1.0, reward_stderr=0.0))
    writer.on_round(HeldOutRecord(22, 0.875, 8, 1.0, reward_stderr=0.125))
    assert (main(["watch", str(of_rounds)]), main(["runs", str(of_rounds.parent)])) == (0, 0)
    shown = capsys.readouterr().out
    assert "held_out   0.25 ± 0.08 first, 0.875 ± 0.12 last, 1 best, after step 21\n" in shown
    assert "held_out   step 21: reward 1  8 answers\n" in shown
    assert re.search(r"reward  eval  0.25    0.875 ± 0.12  1 @21 ", shown)


def test_skipped_steps_are_gaps_and_what_never_changes_takes_no_chart(of_rounds):
    page = Page(whole_page("run", run_fragment(read_run(of_rounds))))
    series = {one["name"]: one["y"] for chart in page.charts if chart["kind"] == "lines" for one in chart["series"]}
    for name in ("training", "gradient norm", "ratio"):
        assert [y is None for y in series[name]] == [False] * 8 + [True] * 4 + [False] * 8, name
    text = " ".join(page.text.split())
    for title, value in (("Learning rate", "1e-05"), ("clip", "0")):
        assert title.lower() not in series
        assert re.search(rf"{title} {value} (\w+ )?throughout", text), title
    # a value that changes keeps its chart, and so does a lone one
    assert {"ratio", "round", "held out"} <= series.keys()
    log = read_run(of_rounds)
    alone = Page(whole_page("run", run_fragment(replace(log, steps=log.steps[:1], rounds=[], held_out=[]))))
    assert "learning rate" in {one["name"] for chart in alone.charts for one in chart["series"]}


def test_what_a_run_says_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    folder = write_synthetic_run(
        tmp_path / "run", num_steps=20, num_evals=2, settings={"name": evil, "lora.rank": evil}
    )
    writer = RunFolderWriter(folder)
    writer.on_answers(AnswersRecord(30, (Answer(evil, f"\u202e{evil}\x1b[2J", evil),), 1.0))
    rated = (RatedAnswer(evil, f"{evil}\x1b[2J", 0.5, {evil: None}),)
    writer.on_round(HeldOutRecord(30, 0.5, 1, 1.0, shown=rated))
    writer.on_event(evil, {evil: evil})
    page = whole_page(evil, run_fragment(read_run(folder)))
    found = Page(page)
    assert found.loads == []
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "\u202e" not in page
    assert any("\\u202e" in text for text in found.texts)
    assert "\x1b" not in page


def killed(folder: Path) -> Path:
    return write_synthetic_run(folder, num_steps=100, stop_after=40)


def without_start(folder: Path) -> Path:
    write_synthetic_run(folder, num_steps=50)
    (folder / "start.json").unlink()
    (folder / "config.yaml").write_text("method: lora\nmodel: {name: tiny}\nlora: {rank: 77}\n")
    return folder


def no_steps_yet(folder: Path) -> Path:
    write_synthetic_run(folder, num_steps=50, stop_after=1, num_evals=1)
    for name in ("metrics.jsonl", "answers.jsonl", "events.jsonl"):
        (folder / name).write_text("")
    return folder


def only_settings(folder: Path) -> Path:
    run_identity(folder)
    (folder / "train.log").write_text("")
    (folder / "config.yaml").write_text("method: lora\nmodel: {name: tiny}\n")
    return folder


def one_step_of_one_rank(folder: Path) -> Path:
    return write_synthetic_run(folder, num_steps=1, num_ranks=1)


def half_a_line(folder: Path) -> Path:
    write_synthetic_run(folder, num_steps=30, stop_after=20)
    lines = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"garbage\n" + lines[:-40])
    return folder


def empty_plan(folder: Path) -> Path:
    write_synthetic_run(folder, num_steps=30)
    start = json.loads((folder / "start.json").read_text())
    start["plan"] |= {"packing": [], "padded": [], "length_edges": [], "length_counts": [], "memory_bytes": None}
    (folder / "start.json").write_text(json.dumps(start))
    return folder


def damaged_numbers(folder: Path) -> Path:
    write_synthetic_run(folder, num_steps=30)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    broken = [{"loss": 1e308}, {"elapsed_s": -1e308}, {"step_s": float("inf")}]
    lines[3:6] = [json.dumps(json.loads(line) | more) for line, more in zip(lines[3:6], broken, strict=True)]
    lines[6] = json.dumps(json.loads(lines[6]) | {"rank_busy_s": [1e308, 5e-324]})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    start = json.loads((folder / "start.json").read_text()) | {"first_started_at": 1e300}
    start["plan"] |= {"length_edges": [0, 1], "padded": start["plan"]["padded"][:1], "num_tokens": 10**30}
    (folder / "start.json").write_text(json.dumps(start))
    return folder


STATES = {
    damaged_numbers: "3 lines of this run",
    killed: "not ended",
    without_start: "77",
    no_steps_yet: "No step yet",
    only_settings: "No step yet",
    one_step_of_one_rank: "complete",
    half_a_line: "1 lines of this run",
    empty_plan: "complete",
}


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_every_state_of_a_run_has_a_page(make, tmp_path, capsys):  # type: ignore[no-untyped-def]
    folder = make(tmp_path / "run")
    for kind in ("html", "md", "json"):
        assert report(folder, "--format", kind) == 0, capsys.readouterr().err
    page = Page((folder / "report.html").read_text())
    assert STATES[make] in page.text
    json.loads(capsys.readouterr().out.split("MB\n")[1].partition("{")[2].join(("{", "")))


def test_markdown_shows_what_people_wrote_as_text(tmp_path, capsys):
    folder = one_step_of_one_rank(tmp_path / "run")
    note = "<script>alert(1)</script> ![x](http://host/x.png) plain | text"
    (folder / "notes.json").write_text(json.dumps({"note": note, "tags": []}))
    assert report(folder, "--format", "md") == 0
    said = capsys.readouterr().out
    assert "&lt;script&gt;alert(1)&lt;/script&gt; ![x]\\(http://host/x.png) plain | text" in said
    assert "<script" not in said


def test_a_setting_that_was_emptied_is_a_change():
    changed = changed_settings({"model.name": "tiny", "eval.prompts": [], "unknown": {}})
    assert changed["eval.prompts"] == ([], None)
    assert "unknown" not in changed


def empty(folder: Path) -> None:
    folder.mkdir()


def foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"loss": 1.0}\nepoch 3\n')


def truncated(folder: Path) -> None:
    write_synthetic_run(folder, num_steps=3)
    start = (folder / "start.json").read_bytes()
    (folder / "start.json").write_bytes(start[: len(start) // 2])
    # with its records, it is read without its start
    (folder / "metrics.jsonl").write_text("")


def nothing_recorded(folder: Path) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")


def a_file(folder: Path) -> None:
    folder.write_text("not a folder")


def binary(folder: Path) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(bytes(range(256)) * 40)


def a_folder_as_metrics(folder: Path) -> None:
    write_synthetic_run(folder, num_steps=3)
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()


@pytest.mark.parametrize(
    "make", [empty, foreign, truncated, nothing_recorded, a_file, binary, a_folder_as_metrics], ids=lambda m: m.__name__
)
def test_other_folders_are_refused_in_a_sentence(make, tmp_path, capsys):  # type: ignore[no-untyped-def]
    folder, good = tmp_path / "run", write_synthetic_run(tmp_path / "good", num_steps=2)
    make(folder)
    for words in ([folder], [good, folder]):
        assert report(*words, "--out", tmp_path / "out.html") == 3
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert str(folder) in captured.err
        assert captured.err.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_refused(tmp_path):
    folder = write_synthetic_run(tmp_path / "run", num_steps=3)
    (folder / "metrics.jsonl").chmod(0)
    assert report(folder) == 3


def test_a_missing_folder_or_one_given_twice_is_a_usage_error(folder, tmp_path):
    assert report(tmp_path / "nothing") == 2
    assert report(folder, folder / ".", "--format", "md") == 2


def test_several_runs_show_what_differs(folder, tmp_path, monkeypatch, capsys):
    settings = {"name": "high rank", "lora.rank": 64}
    other = write_synthetic_run(tmp_path / "two", num_steps=200, stop_after=150, seed=1, settings=settings)
    monkeypatch.chdir(tmp_path)
    assert report(folder, other) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert "Loss, evaluation" in page.texts
    assert page.texts[page.texts.index("lora.rank") :][1:3] == ["32", "64"]
    assert "optim.lr" not in page.texts, "equal settings are left out"
    capsys.readouterr()
    assert report(folder, other, "--format", "md") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| lora.rank | 32 | 64 |" in lines
    assert "| Outcome | complete | not ended |" in lines


def test_runs_of_one_name_are_told_apart(folder, tmp_path):
    other = write_synthetic_run(tmp_path / "two", num_steps=10)
    assert report(folder, other, "--format", "json", "--out", tmp_path / "both.json") == 0
    runs = json.loads((tmp_path / "both.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [str(folder), str(other)]
    assert runs[1]["summary"]["num_steps"] == 10
    assert runs[1]["evals"][-1]["eval_loss"] > 0
