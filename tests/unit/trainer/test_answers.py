"""Answers while training: what is asked, what is answered, and that nothing of the run changes by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError, FlatoutError, UsageError
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.parallel.rank import Rank
from flatout.rollout import sampler_model
from flatout.rollout.chat import Sampling, answer
from flatout.track.callback import MemoryCallback, Reporter
from flatout.track.run_log import read_run
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.run import train
from tests.usual import every, usual

PROMPTS = ["What is my name?", "Sort from a to z: ibis, cat."]
EVAL = {"fraction": 0.1, "every_steps": 6}


def settings(**evaluation: Any) -> dict[str, Any]:
    """A run that learns to write some words within 12 steps, with dropout, which draws random numbers."""
    return {
        "batch": {"max_steps": 12},
        "optim": {"lr": 2e-2},
        "lora": {"rank": 8, "dropout": 0.1},
        "eval": {**EVAL, **evaluation},
    }


def planned(tiny: Any, folder: Path, said: MemoryCallback | None = None, **sections: Any) -> PlannedRun:
    config = tiny.config(folder / "run", **sections)
    return open_and_plan(config, Reporter(*([said] if said else [])), Rank())


@pytest.fixture(scope="module")
def counted(tiny, tmp_path_factory):
    """The folder of a run, and how many tokens each pass through the first layer's cache had."""
    folder, passes = tmp_path_factory.mktemp("answered"), list[int]()
    forward = Qwen3Attention.forward

    def count(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 0 and kwargs.get("past_key_values") is not None:
            passes.append(hidden_states.shape[1])
        return forward(self, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3Attention, "forward", count)
        train(tiny.config(folder, **settings(prompts=PROMPTS, max_new_tokens=10)))
    return folder, passes


@pytest.fixture(scope="module")
def answered(counted):
    return counted[0]


def test_answers_are_those_of_chat_with_the_same_weights(answered):
    log = read_run(answered)
    assert [record.step for record in log.answers] == [0, 6, 12]
    last = log.answers[-1].answers
    model, tokenizer = load_trained(resolve_model_paths(str(answered)), device=torch.device("cpu"))
    greedy = {"max_new_tokens": 10, "sampling": Sampling(temperature=0.0)}
    expected = [answer(model, tokenizer, [{"role": "user", "content": text}], **greedy) for text in PROMPTS]
    assert [one.prompt for one in last] == PROMPTS
    assert [one.answer for one in last] == expected
    assert all(expected)


def test_on_a_cpu_no_time_passes_for_answers_before_step_1_unless_they_are_asked_for(tiny, answered, tmp_path):
    train(tiny.config(tmp_path, **settings(prompts=None)))
    for folder, steps in ((tmp_path, [6, 12]), (answered, [0, 6, 12])):
        log = read_run(folder)
        assert [one.step for one in log.evals] == [0, 6, 12]
        assert [one.step for one in log.answers] == steps


def test_a_run_with_answers_equals_one_without_to_the_bit(tiny, answered, tmp_path):
    after: list[torch.Tensor] = []
    for folder, evaluation in (("with", {"prompts": PROMPTS, "temperature": 1.0}), ("without", {"prompts": []})):
        torch.manual_seed(3)
        train(tiny.config(tmp_path / folder, **settings(**evaluation)))
        after.append(torch.get_rng_state())
    runs = [answered, tmp_path / "with", tmp_path / "without"]
    logs = [read_run(folder) for folder in runs]
    losses = [[(step.loss, step.grad_norm) for step in log.steps] for log in logs]
    assert losses[0] == losses[1] == losses[2]
    evaluations = [[(one.eval_loss, one.eval_token_accuracy) for one in log.evals] for log in logs]
    assert evaluations[0] == evaluations[1] == evaluations[2]
    assert torch.equal(*after)
    trained = [load_file(folder / "final" / "adapter_model.safetensors") for folder in runs]
    for name, tensor in trained[0].items():
        assert torch.equal(trained[1][name], tensor)
        assert torch.equal(trained[2][name], tensor)
    # drawn at temperature 1, not the likeliest ones; a prompts list of none answers nothing
    assert logs[1].answers[-1].answers != logs[0].answers[-1].answers
    assert logs[2].answers == []
    assert all(one.eval_tokens_per_s > 0 and one.by_data == {} for log in logs for one in log.evals)


def test_each_token_is_computed_once(tiny, counted, tmp_path, monkeypatch):
    """With a cache, prompts together; without an exact one, the answers are the same and say so."""
    folder, passes = counted
    log = read_run(folder)
    # at each of three evaluations the prompts in one pass, then a token of each in every other
    assert sum(num_tokens > len(PROMPTS) for num_tokens in passes) == 3
    assert len(passes) <= 3 * (2 + 9)
    monkeypatch.setitem(sampler_model.TOLERANCES, torch.float32, -1.0)
    train(tiny.config(tmp_path / "again", **settings(prompts=PROMPTS, max_new_tokens=10)))
    again = read_run(tmp_path / "again")
    assert [record.answers for record in again.answers] == [record.answers for record in log.answers]
    # one sampler for the run, which remembers
    assert (tmp_path / "again" / "train.log").read_text().count("every token computes its prompt again") == 1


def test_a_low_temperature_draws_the_likeliest_tokens(tiny, answered, tmp_path):
    cold = settings(prompts=PROMPTS, max_new_tokens=10, temperature=1e-4)
    train(tiny.config(tmp_path / "cold", **cold))
    log, greedy = read_run(tmp_path / "cold"), read_run(answered)
    assert [record.answers for record in log.answers] == [record.answers for record in greedy.answers]


@pytest.mark.parametrize("template", usual(["chatml", "qwen3", "alpaca"], ["qwen3"]))
def test_rows_of_the_evaluation_set_are_asked(tiny, tmp_path, template):
    rows = [
        [{"role": "user", "content": f"Say {name}."}, {"role": "assistant", "content": f"It is {name}."}]
        for name in ("ada", "bob", "cy", "dee", "eve", "flo")
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"root": str(tmp_path), "sources": [{"path": str(file)}], "template": template}
    plan = planned(tiny, tmp_path, data=data, batch={"max_steps": 1}, eval={"fraction": 0.5, "prompts": None})
    assert plan.prompts is not None
    # qwen3 writes an empty <think></think>, which is trained as part of the answer
    answers = [str(prompt.reference).removeprefix("<think>\n\n</think>\n\n") for prompt in plan.prompts.prompts]
    asked = {(prompt.text, text) for prompt, text in zip(plan.prompts.prompts, answers, strict=True)}
    assert len(asked) == 3
    assert asked <= {(row[0]["content"], row[1]["content"]) for row in rows}
    tokenizer = load_tokenizer(str(tiny.model_dir))
    tokenizer.chat_template = plan.store.meta.template_text
    for prompt in plan.prompts.prompts:
        turn = [{"role": "user", "content": prompt.text}]
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        context = str(tokenizer.decode(prompt.token_ids))
        # what a template writes before an answer, such as an empty <think>, may be trained
        assert text.startswith(context) or context.startswith(text)


def test_text_and_tokens_without_turns_continue_in_the_middle(tiny, tmp_path):
    texts = tmp_path / "texts.jsonl"
    words = "one two three four five six seven eight"
    texts.write_text("".join(json.dumps({"text": f"{number} {words}"}) + "\n" for number in range(8)))
    tokens = tmp_path / "tokens.jsonl"
    labels = [-100] * 12 + list(range(32, 37)) + [-100] * 3
    rows = [{"input_ids": [*range(20, 39), last], "labels": labels} for last in range(40, 44)]
    tokens.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for file in (texts, tokens):
        data = {"name": file.stem, "root": str(tmp_path), "sources": [{"path": str(file)}]}
        plan = planned(tiny, tmp_path, data=data, batch={"max_steps": 1}, eval={"fraction": 0.5, "prompts": None})
        assert plan.prompts is not None
        found.append((plan, plan.prompts.prompts[0]))
    plan, prompt = found[0]
    sample = min(plan.eval_sets[0].step.sample_ids)
    assert list(prompt.token_ids) == plan.store.sample(sample).token_ids[: len(prompt.token_ids)].tolist()
    assert len(prompt.token_ids) == (plan.store.lengths[sample] + 1) // 2
    assert prompt.reference
    assert f"{prompt.text} {prompt.reference}".split()[-1] == "eight"
    assert list(found[1][1].token_ids) == list(range(20, 32))


def test_a_long_prompt_is_cut_and_said(tiny, tmp_path):
    said = MemoryCallback()
    file = tmp_path / "prompts.txt"
    file.write_text("short\n\n" + "word " * 5000 + "\n")
    given = {"eval": {**EVAL, "prompts": str(file), "max_new_tokens": 48}}
    plan = planned(tiny, tmp_path, said, **given, batch={"micro_batch_tokens": 2048})
    assert plan.prompts is not None
    assert [len(prompt.token_ids) < 2000 for prompt in plan.prompts.prompts] == [True, False]
    assert len(plan.prompts.prompts[1].token_ids) == 2000
    lines = [text for _, name, text in said.stages if name == "answers"]
    assert "prompt 2: only its last 2,000 of " in lines[0]
    assert lines[1] == "2 prompts at each evaluation, at most 48 tokens each"


def test_a_prompt_that_no_pass_holds_is_refused_by_its_row(tiny, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("short\n\n" + "word " * 800 + "\n")
    for prompts, where in (
        (str(file), "prompts.txt:3 has "),
        (["short", "word " * 800], "eval.prompts: prompt 2 has "),
    ):
        with pytest.raises(UsageError, match=f"{where}.* a pass holds at most 700") as caught:
            planned(tiny, tmp_path, eval={**EVAL, "prompts": prompts}, batch={"micro_batch_tokens": 700})
        assert caught.value.fixes


def test_rows_are_chosen_that_a_pass_holds(tiny, tmp_path):
    file = tmp_path / "texts.jsonl"
    texts = [f"{n} " + "one two three " * (4 + 40 * (n % 4 > 0)) for n in range(40)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"root": str(tmp_path), "sources": [{"path": str(file)}]}
    found = []
    for most in (4, 300):
        said = MemoryCallback()
        evaluation = {"fraction": 0.5, "prompts": None, "max_new_tokens": most}
        plan = planned(tiny, tmp_path / str(most), said, data=data, eval=evaluation, batch={"micro_batch_tokens": 450})
        assert plan.prompts is not None
        lengths = [len(prompt.token_ids) for prompt in plan.prompts.prompts]
        assert len(lengths) == 3
        assert max(lengths) + most <= 450
        found.append((max(lengths), next(text for _, name, text in said.stages if name == "answers")))
    assert found[0][0] > 50 > found[1][0]
    assert "too long" not in found[0][1]
    assert "too long: a pass holds 450 tokens, 300 of them for the answer (eval.max_new_tokens)" in found[1][1]


def test_a_run_without_memory_to_answer_says_so_and_trains_on(tiny, answered, tmp_path, monkeypatch):
    def fail(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr("flatout.trainer.answers.next_logits", fail)
    train(tiny.config(tmp_path, **settings(prompts=PROMPTS, max_new_tokens=10)))
    log = read_run(tmp_path)
    assert [(one.step, one.answers) for one in log.answers] == [(0, ()), (6, ()), (12, ())]
    assert all("out of memory; shorten eval.prompts" in str(one.skipped) for one in log.answers)
    assert [event["step"] for event in log.events if event["kind"] == "answers_skipped"] == [0, 6, 12]
    assert [step.loss for step in log.steps] == [step.loss for step in read_run(answered).steps]


BAD: dict[str, tuple[str | None, type[FlatoutError], str]] = {
    "none.txt": (None, DataError, "none.txt: No such file or directory; name a file of prompts"),
    "empty.txt": ("\n \n", DataError, "empty.txt: no prompts"),
    "rows.csv": ("prompt\na\n", DataError, "rows.csv: expected a file of prompts: .txt, .json"),
    "damaged.jsonl": ('{"prompt": "a"}\n{"prompt": \n', DataError, "damaged.jsonl:2:"),
    "columns.jsonl": ('{"question": "a"}\n', DataError, "columns.jsonl:1: expected one of the columns prompt and mess"),
    "number.jsonl": ('{"prompt": "a"}\n{"prompt": 7}\n', DataError, "number.jsonl:2: turn 1 needs a role"),
    "empty.jsonl": ('{"prompt": []}', DataError, "empty.jsonl:1: prompt[0].content is an empty list"),
    "called.json": (
        '[{"messages": [{"role": "user", "content": [{"type": "sound"}]}]}]',
        DataError,
        "called.json:1: messages[0].content[0].type 'sound'",
    ),
    "turns.jsonl": (
        '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        DataError,
        "turns.jsonl:1: the last turn is the assistant's",
    ),
    "many.txt": ("a\n" * 33, UsageError, "33 prompts; at most 32 are answered"),
    "large.txt": ("a" * 140_000, DataError, "large.txt: 140,000 bytes of prompts exceed the limit of 131,072"),
}


def test_a_prompt_is_a_text_its_parts_or_turns(tiny, tmp_path):
    """As TRL and OpenAI write them, they are the same tokens."""
    file, parts = tmp_path / "forms.jsonl", [{"type": "text", "text": "What is "}, {"type": "text", "text": "my name?"}]
    asked = {"role": "user", "content": "What is my name?"}
    rows: list[dict[str, Any]] = [
        {"prompt": "What is my name?"},
        {"prompt": [asked], "answer": "Ada"},
        {"prompt": parts},
        {"prompt": [{"role": "user", "content": parts}]},
        {"messages": [asked]},
        {"messages": [{"role": "user", "content": parts}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = planned(tiny, tmp_path, eval={**EVAL, "prompts": str(file)})
    assert plan.prompts is not None
    assert len(plan.prompts.prompts) == len(rows)
    assert {(one.text, one.token_ids) for one in plan.prompts.prompts} == {
        ("What is my name?", plan.prompts.prompts[0].token_ids)
    }


@pytest.mark.parametrize("name", every(3, BAD))
def test_a_file_of_prompts_that_cannot_be_used_is_refused(tiny, tmp_path, name):
    content, error, text = BAD[name]
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(error) as caught:
        planned(tiny, tmp_path, eval={**EVAL, "prompts": str(file)})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("evaluation", "text"),
    [
        ({"prompts": ["a"]}, "prompts needs rows to evaluate on"),
        ({"temperature": 1.0}, "temperature needs rows to evaluate on"),
        ({"fraction": 0.1, "prompts": [], "max_new_tokens": 3}, "max_new_tokens has no effect with prompts: []"),
        ({"data": ["a", "a"]}, "each named once"),
        ({"data": []}, "at least one data set"),
        ({"prompts": ["a"], "fraction": 0.1, "max_new_tokens": 3}, None),
        ({"temperature": 1.0, "prompts": ["a"], "data": ["a", "b"]}, None),
    ],
)
def test_settings_without_effect_are_refused(tiny, tmp_path, evaluation, text):
    if text is None:
        assert tiny.config(tmp_path, eval=evaluation).eval
        return
    with pytest.raises(UsageError, match=text.replace("[", r"\[")):
        tiny.config(tmp_path, eval=evaluation)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["model", "nf4", "fp8"])
def test_compiled_layers_and_recorded_graphs_answer_and_train_on(tiny, tmp_path, storage):
    """On a GPU as on a CPU: the steps between answers do not change, and nothing is compiled for answers."""
    if storage == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products")
    sections = {"device": "cuda", "deterministic": True, "model": {"precision": "bf16"}, "base": {"storage": storage}}
    losses = []
    for folder, prompts in (("with", PROMPTS), ("without", [])):
        train(tiny.config(tmp_path / folder, **sections, batch={"max_steps": 12}, eval={**EVAL, "prompts": prompts}))
        log = read_run(tmp_path / folder)
        losses.append([(step.loss, step.grad_norm) for step in log.steps])
        assert [len(record.answers) for record in log.answers] == [len(prompts)] * (3 if prompts else 0)
        assert not [event for event in log.events if event["kind"] == "compiled"]
    assert losses[0] == losses[1]
