"""What `import flatout` offers, as a notebook uses it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import threading
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flatout
from flatout.api.inputs import data_file
from flatout.config.folders import run_identity
from flatout.data.token_store import TokenStore
from flatout.errors import DataError, ResourceError, UsageError

SETTINGS: dict[str, Any] = {
    "device": "cpu", "rank": 4, "lr": 1e-3, "samples_per_step": 6, "max_steps": 3, "max_tokens": 500,
    "eval": {"prompts": []}, "checkpoint": {"every_steps": None},
}  # fmt: skip


def rows_of(tiny: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tiny.chats.read_text().splitlines()]


def losses(run: flatout.Run) -> list[float]:
    return [step.loss for step in run.log.steps]


@pytest.fixture(scope="module")
def by_path(tiny, tmp_path_factory):
    """The run that all others must equal: model and data by their paths."""
    folder = tmp_path_factory.mktemp("by-path")
    return flatout.train(
        model=str(tiny.model_dir), data={"sources": [{"path": str(tiny.chats)}], "root": str(folder / "data")},
        run_dir=folder / "run", **SETTINGS,
    )  # fmt: skip


def test_ten_minutes_of_a_notebook_user(tiny, by_path, tmp_path, monkeypatch):
    """A data set and a model in memory, to a merged model that plain transformers loads."""
    import datasets

    monkeypatch.chdir(tmp_path)

    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps: list[int] = []

    class Counter(flatout.Callback):
        def on_step(self, record: Any) -> None:
            steps.append(record.step)

    run = flatout.train(
        model=model, tokenizer=tokenizer, data=datasets.Dataset.from_list(rows_of(tiny)), callbacks=[Counter()],
        run_dir=tmp_path / "run", **SETTINGS,
    )  # fmt: skip
    assert steps == [1, 2, 3]
    assert losses(run) == losses(by_path)
    # an unchanged model is named by where it came from, and stays as it was
    assert run.config.model.name == str(tiny.model_dir)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    frame = run.metrics()
    assert list(frame["loss"] if hasattr(frame, "columns") else [row["loss"] for row in frame]) == losses(run)
    assert "<iframe" in run.plot()._repr_html_()
    assert run.plot().save(tmp_path / "page.html").stat().st_size > 10_000
    answer = run.chat("Hello", max_new_tokens=4, temperature=0)
    assert answer == run.generate(["Hello"], max_new_tokens=4, temperature=0)[0]
    merged = run.merge(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert not torch.equal(plain.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    assert repr(flatout.load(run.folder)) == repr(run)


def test_prompts_are_texts_or_conversations(by_path):
    asked, told = {"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief"}
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0}
    said = by_path.generate("Hello", **options)
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for prompts in (["Hello"], asked, [asked], [[asked]], (one for one in ["Hello"]), [{**asked, "content": parts}]):
        assert by_path.generate(prompts, **options) == said
    assert by_path.generate(["Hello", [asked]], **options) == said * 2
    assert by_path.generate([asked], system="Be brief", **options) == by_path.generate([told, asked], **options)
    whole = {"top_k": np.int64(0), "max_new_tokens": np.int64(4), "temperature": 0, "seed": 2**63 - 1}
    assert by_path.generate("Hello", **whole) == said
    for option, value in (
        ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")), ("max_new_tokens", 0),
        ("system", 3), ("max_new_tokens", 2.5), ("max_new_tokens", None), ("top_p", 2.0), ("top_k", -1), ("seed", -1),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"^{option} is .*; expected "):
            by_path.generate("Hello", **{option: value})
    bad: list[tuple[Any, str]] = [
        ([[{"role": "user"}]], "turn 1 of prompt 1 needs role and content, a text or parts; it has role"),
        (
            ["Hello", [asked, {"content": "Hi"}]],
            "turn 2 of prompt 2 needs role and content, a text or parts; it has content",
        ),
        ([[{"role": "user", "content": 3}]], "turn 1 of prompt 1 needs role and content"),
        ([["Hello"]], "prompt 1 is neither a text nor a list of turns"),
        (["Hello", 3], "prompt 2 is neither a text nor a list of turns"),
        (["Hello", []], "prompt 2 is neither a text nor a list of turns"),
    ]
    for prompts, text in bad:
        with pytest.raises(UsageError, match=text):
            by_path.generate(prompts, **options)


def test_samples_have_the_log_probabilities_of_what_they_were_drawn_from(by_path, tmp_path):
    found = by_path.sample(["Hello", "Sort: b a"], 3, max_new_tokens=4, temperature=0.7, seed=5)
    assert found[0] == by_path.sample("Hello", n=3, max_new_tokens=4, temperature=0.7, seed=5)[0]
    assert [len({one.token_ids for one in group}) > 1 for group in found] == [True, True]
    merged = by_path.merge(tmp_path / "merged")
    tokenizer, model = AutoTokenizer.from_pretrained(merged), AutoModelForCausalLM.from_pretrained(merged)
    asked = [{"role": "user", "content": "Hello"}]
    prompt = list(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])
    for one in found[0]:
        ids = torch.tensor([[*prompt, *one.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7
        true = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
        assert one.logprobs == pytest.approx(true[:, 0].tolist(), abs=1e-4)
        assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True).strip()
        assert one.ending in ("stop", "length")
    (greedy,) = by_path.sample("Hello", max_new_tokens=4, temperature=0)[0]
    assert [greedy.text] == by_path.generate("Hello", max_new_tokens=4, temperature=0)
    with pytest.raises(UsageError, match=r"^n is 0; expected at least 1"):
        by_path.sample("Hello", 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rnak": 8}, "rnak: unknown key; did you mean lora.rank"),
        ({"lora": {"rank": 0}}, "lora.rank: .*got 0"),
        ({"lr": 1e-4, "optim": {"lr": 1e-3}}, "both given"),
        ({"objective": {"kind": "dpo", "bta": 0.2, "label_smoothing": 0.1}}, r"objective.bta: .*did you mean beta\?"),
        ({"data": [{"text": "a row"}]}, r"data.sources.0.path: missing; .*data=rows"),
    ],
)
def test_a_wrong_config_says_each_problem_in_a_sentence(settings, said):
    with pytest.raises(UsageError, match=said) as error:
        flatout.Config(model="a", **settings)
    assert "pydantic" not in str(error.value)
    right = flatout.Config(model="a", data="rows.jsonl", rank=8, lr=1e-4)
    assert (right.lora.rank, right.optim.lr, right.data.sources[0].path) == (8, 1e-4, "rows.jsonl")
    assert right == flatout.Config.model_validate({"model": "a", "data": "rows.jsonl", "rank": 8, "lr": 1e-4})


@pytest.mark.parametrize("kind", ["generator", "pandas", "arrow", "numbers", "paths"])
def test_data_in_memory_is_trained_as_the_file_is(tiny, by_path, tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows: Any = rows_of(tiny)
    if kind == "generator":
        rows = (row for row in rows)
    elif kind == "pandas":
        rows = pytest.importorskip("pandas").DataFrame(rows)
    elif kind == "arrow":  # as a table of polars, whose stream has types that no file of parquet can hold
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        rows = SimpleNamespace(__arrow_c_stream__=None, to_arrow=lambda: table, columns=table.column_names)
    elif kind == "numbers":
        learns = {False: np.array([0])[0], True: torch.ones((), dtype=torch.bool)}
        rows = [
            {"messages": [{**turn, "train": learns[turn["role"] == "assistant"]} for turn in row["messages"]]}
            for row in rows
        ]
    elif kind == "paths":
        rows = (tiny.chats,)
    if kind == "generator":
        run = flatout.train({"model": str(tiny.model_dir)}, data=rows, **SETTINGS)
        assert losses(run) == losses(by_path)
        assert run.folder == Path("runs/run")
        return
    store = flatout.build_data(rows, tokenizer=str(tiny.model_dir), name="mine", max_tokens=500)
    (manifest,) = (by_path.folder.parent / "data").rglob("manifest.json")
    of_file = TokenStore.open(manifest.parent)
    assert np.array_equal(store.token_ids, of_file.token_ids)
    assert np.array_equal(store.loss_mask, of_file.loss_mask)


def test_a_changed_model_trains_from_its_own_weights(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    run = flatout.train(model=model, data=str(tiny.chats), **SETTINGS)
    base = Path(run.config.model.name)
    assert base.parent == run.folder
    saved = AutoModelForCausalLM.from_pretrained(base)
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in model.state_dict().items())
    # the same object again: the finished run is found, nothing is written twice
    again = flatout.train(model=model, data=str(tiny.chats), **SETTINGS)
    assert losses(again) == losses(run)
    assert len(list(run.folder.glob("model-*"))) == 1


def test_a_model_that_peft_has_changed_is_refused_and_a_merged_one_is_written(tiny, tmp_path):
    from peft import LoraConfig, get_peft_model

    from flatout.api.inputs import model_source

    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UsageError, match=r"layers of a PEFT adapter in it; .* merge_and_unload\(\)"):
        model_source(model, tmp_path)
    assert not [*tmp_path.iterdir()]
    with torch.no_grad():
        wrapped.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight.fill_(1)
    assert Path(model_source(wrapped.merge_and_unload(), tmp_path)).parent == tmp_path


def test_a_run_whose_folder_is_gone_says_so_and_merging_needs_a_device_that_is_there(by_path, tmp_path):
    run = flatout.load(shutil.copytree(by_path.folder, tmp_path / "run"))
    with pytest.raises(UsageError, match="device is 'gpu'; expected cpu or cuda"):
        run.merge(tmp_path / "merged", device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ResourceError, match=r'^device cuda needs a GPU, but .*\n  try device="cpu"'):
            run.merge(tmp_path / "merged", device="cuda")
    shutil.rmtree(run.folder)
    for call in (lambda: run.config, lambda: run.generate("Hello"), run.metrics):
        with pytest.raises(DataError, match="is not a run folder"):
            call()


def test_threads_train_one_after_another(tiny, by_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    runs = dict[str, flatout.Run]()

    class Watcher(flatout.Callback):
        def on_start(self, start: Any) -> None:
            seen.append("start")

        def on_end(self, end: Any) -> None:
            seen.append("end")

    def run(name: str) -> None:
        paths: dict[str, Any] = {"model": str(tiny.model_dir), "data": str(tiny.chats)}
        runs[name] = flatout.train(name=name, callbacks=[Watcher()], **paths, **SETTINGS)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["start", "end"] * 2
    assert [losses(runs[name]) for name in "ab"] == [losses(by_path)] * 2


def test_two_processes_are_started_and_callbacks_follow_them(tiny, by_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told: list[Any] = []

    class Teller(flatout.Callback):
        def on_start(self, start: Any) -> None:
            told.append(("start", start.num_ranks))

        def on_step(self, record: Any) -> None:
            told.append(("step", record.step))

        def on_save(self, step: int, folder: Path) -> None:
            told.append(("save", step))

        def on_end(self, end: Any) -> None:
            told.append(("end", end.outcome))

    run = flatout.train(model=str(tiny.model_dir), data=str(tiny.chats), gpus=[0, 1], callbacks=[Teller()], **SETTINGS)
    assert [one for one in told if one[0] in ("start", "step")] == [("start", 2), ("step", 1), ("step", 2), ("step", 3)]
    assert ("save", 3) in told
    assert told[-1] == ("end", "complete")
    assert losses(run) == pytest.approx(losses(by_path), rel=1e-4)


def test_an_error_of_a_started_rank_is_raised_here(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 3}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        flatout.train(model=str(tiny.model_dir), data=str(bad), gpus=[0, 1], **SETTINGS)
    with pytest.raises(DataError, match="needs a chosen and a rejected answer") as refused:
        flatout.train(
            model=str(tiny.model_dir), data=str(tiny.chats), objective="simpo", gpus=[0, 1], name="pairs", **SETTINGS
        )
    assert refused.value.fixes[0].settings == {"objective": "cross_entropy"}


def test_a_callback_of_started_ranks_that_raises_stops_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Broken(flatout.Callback):
        def on_step(self, record: Any) -> None:
            raise RuntimeError("broken callback")

    settings = {**SETTINGS, "max_steps": 100_000}
    with pytest.raises(RuntimeError, match="broken callback"):
        flatout.train(model=str(tiny.model_dir), data=str(tiny.chats), gpus=[0, 1], callbacks=[Broken()], **settings)
    assert flatout.load("runs/run").log.end.outcome == "stopped"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": 3}, "data is a int"),
        ({"data": [3]}, "row 1 is a int"),
        ({"data": [[{"role": "user", "content": "a"}]]}, r'row 1 is a list; expected a mapping, such as \{"messages"'),
        ({"data": iter(())}, "^data has no rows; give at least one"),
        ({"data": b"rows.jsonl"}, "data is a bytes; expected a path, .* or rows"),
        ({"data": {"prompt": ["a"], "completion": ["b"]}}, r"the columns prompt, completion; .* data=\[\{.prompt.: "),
        ({"data": {"prompt": "a", "completion": "b"}}, "data is a dict of one row; rows are a list, also a single one"),
        ({"data": {"messages": [{"role": "user", "content": "a"}]}}, "data is a dict of one row; rows are a list"),
        (
            {"data": {"train": [{"text": "a"}], "test": []}},
            r"the splits train, test; pass one, such as data\['train'\]",
        ),
        ({"data": {"max_token": 500}}, "data.max_token: unknown key; did you mean data.max_tokens"),
        ({"data": [{"text": float("nan")}]}, "row 1"),
        ({"data": [{"prompt": "a", "chosen": "b " * 99, "rejected": "c"}], "max_tokens": 64}, "too_long"),
        ({"model": 3}, "model is a int"),
        ({"tokenizer": 3}, "tokenizer is a int"),
        ({"lr": 1e-4, "optim": {"lr": 1e-3}}, "both given"),
        ({"learning_rate": 1e-4}, "did you mean optim.lr"),
        ({"objective": object(), "gpus": [0, 1]}, "expected a setting, got the object object"),
    ],
)
def test_wrong_calls_are_said_in_a_sentence(tiny, tmp_path, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    call = {"model": str(tiny.model_dir), "data": str(tiny.chats), "device": "cpu", **given}
    with pytest.raises((UsageError, DataError), match=said):
        flatout.train(**call)


def test_columns_of_several_types_are_said_in_a_sentence(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame({"instruction": ["a", "b"], "output": ["c", 3]})
    with pytest.raises(DataError, match=r'^data: .*column output.*; pass .*data=data\.to_dict\("records"\)$'):
        data_file(frame, tmp_path)
    assert Path(data_file(frame.to_dict("records"), tmp_path)).read_text().count("\n") == 2


def test_plan_verify_and_build_data(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    store = flatout.build_data(rows_of(tiny), tokenizer=tokenizer, name="chats", max_tokens=500)
    assert store.num_samples == 120
    config = flatout.Config(model=str(tiny.model_dir), data="chats", device="cpu", max_steps=2, samples_per_step=6)
    planned = flatout.plan(config, ranks=2, device="h100")
    assert planned.totals.num_ranks == 2
    assert "steps" in str(planned)
    rows = flatout.verify(config, ranks=1, model={"precision": "fp32"})
    assert {row.verdict for row in rows} <= {"ok", "left out"}


def test_names_stay_functions():
    """No module that they import takes their place."""
    for module in ("trainer.run", "planner.cost", "verifier.run"):
        import_module(f"flatout.{module}")
    assert callable(flatout.train)
    assert callable(flatout.plan)
    assert callable(flatout.verify)
    assert set(dir(flatout)) >= {"Config", "train", "load"}


def test_copies_of_rows_that_nothing_uses_are_swept(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(text: str) -> Path:
        """A copy of rows that a process has written and left."""

        def write() -> None:
            Path("written").write_text(str(data_file([{"text": text}], Path("data/in_memory"))))

        process = multiprocessing.get_context("fork").Process(target=write)
        process.start()
        process.join()
        return Path(Path("written").read_text())

    def named_by(run: str, copy: Path, *, is_finished: bool) -> None:
        run_identity(Path("runs") / run)
        if is_finished:
            (Path("runs") / run / "final").mkdir()
        (Path("runs") / run / "train.log").touch()
        (Path("runs") / run / "config.yaml").write_text(f"data: {{sources: [{{path: {copy}}}]}}")

    copy = written("of nothing")
    unfinished = written("of a run to go on with")
    assert not copy.exists()  # nothing used the first when the second came
    named_by("stopped", unfinished, is_finished=False)
    finished = written("of a finished run")
    named_by("done", finished, is_finished=True)
    flatout.build_data([{"text": "a text"}], tokenizer=str(tiny.model_dir), name="mine")
    assert unfinished.exists()
    assert not finished.exists()
    flatout.build_data([{"text": "another"}], tokenizer=str(tiny.model_dir), name="other")
    names = {path.name for path in Path("data/in_memory").glob("data-*")}
    assert len(names) == 3  # both sets and the run
    assert written("of a later process").exists()
    assert {path.name for path in Path("data/in_memory").glob("data-*")} > names


@pytest.mark.parametrize("data", ["rows", pytest.param("path", marks=pytest.mark.exhaustive)])
def test_a_plan_takes_what_training_takes_and_says_first_whether_it_fits(tiny, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    given: Any = rows_of(tiny) if data == "rows" else str(tiny.chats)
    settings = {name: value for name, value in SETTINGS.items() if name != "device"}
    here = flatout.plan(model=str(tiny.model_dir), data=given, device="cpu", **settings)
    assert str(here).startswith("fits ")
    assert "that this computer has free; it trains on its CPU" in str(here)
    assert str(flatout.plan(model=str(tiny.model_dir), data=given, device="12GB", **settings)).startswith("fits ")
    with pytest.raises(flatout.FlatoutError, match="which need about"):
        flatout.plan(model=str(tiny.model_dir), data=given, device="0.63GB", **settings)
    with pytest.raises(flatout.FlatoutError, match="device '12 apples' is unknown; choose one of b200"):
        flatout.plan(model=str(tiny.model_dir), data=given, device="12 apples", **settings)
