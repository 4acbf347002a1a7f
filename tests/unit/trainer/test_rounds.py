"""Runs of rounds: what is sampled, scored and trained, by any number of ranks, killed anywhere, and replayed."""

import json
import os
import shutil
import signal
import time
from itertools import count

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from spawned_ranks import start_warm_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from warm_process import WarmProcess

from flatout import load
from flatout.cli.main import main
from flatout.config.folders import foreign_entries
from flatout.config.read import dump_config, make_config
from flatout.data.token_store import TokenStore
from flatout.errors import CheckpointError, PreemptedError, UsageError
from flatout.io.redact import printable
from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.track.console import ConsoleCallback
from flatout.track.summary import summarize
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.replay import replay
from flatout.trainer.run import train
from flatout.view.report import run_fragment

QUESTIONS = ("Sort the words", "Count up", "Say it backwards", "Who are you?", "Spell cat", "What is next?")
# lines of the answer, counted by a person's own function; a second one that is only reported
REWARDS = """
def commas(answer, row):
    return float(answer.count("e") + row["bonus"])

def reward(completions, **columns):
    return [None if "q" in answer else len(answer) / 10 for answer in completions]
"""


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """A folder with prompts and rewards; `config(name, ...)` is a run of two rounds of two steps in it."""
    root = tmp_path_factory.mktemp("rounds")
    rows = [{"prompt": f"{QUESTIONS[n % 6]} {n}.", "bonus": n % 2} for n in range(10)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARDS)

    def config(name, **sections):
        rewards = [f"{root}/rewards.py:commas", {"path": f"{root}/rewards.py:reward", "weight": 0.5}]
        values = {
            "run_dir": str(root / name), "device": "cpu", "seed": 7, "method": "full", "objective": "grpo",
            "model": {"name": str(tiny.model_dir), "precision": "fp32"}, "optim": {"lr": 3e-3},
            "data": {"sources": [{"path": str(root / "prompts.jsonl")}], "root": str(root / "data")},
            "rollout": {"rounds": 2, "prompts": 4, "group": 3, "steps": 2, "max_new_tokens": 6, "rewards": rewards},
            "checkpoint": {"every_steps": 1, "keep": 9}, "eval": {"fraction": 0.2, "every_steps": 2, "prompts": []},
        }  # fmt: skip
        for section, more in sections.items():
            before = values.get(section)
            values[section] = {**before, **more} if isinstance(before, dict) and isinstance(more, dict) else more
        return make_config(values, [])

    config.root = root
    return config


@pytest.fixture(scope="module")
def ran(world):
    train(world("whole", rollout={"temperature": 0.8}))
    return world.root / "whole"


def stores(folder):
    return [TokenStore.open(path) for path in sorted((folder / "rollouts").glob("round-??????"))]


def final(folder):
    return load_file(folder / "final" / "model.safetensors")


def assert_same_end(one, other, atol=0.0):
    for (name, expected), got in zip(final(one).items(), final(other).values(), strict=True):
        assert torch.allclose(expected, got, rtol=0, atol=atol), name


def test_a_round_is_what_plain_transformers_and_numpy_say(ran, tiny):
    """Labels are the sampled tokens; each has its log-probability at the temperature, and its answer's advantage."""
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    first, log = stores(ran)[0], load(ran).log
    scores = []
    for index in range(first.num_samples):
        ids, mask = first.sample(index).pair
        start = int(np.argmax(mask))
        assert mask[start:].all()
        assert not mask[:start].any()
        assert 1 <= len(ids) - start <= 6
        with torch.no_grad():
            logits = model(torch.tensor(ids, dtype=torch.int64)[None]).logits[0, :-1] / 0.8
        expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]][start - 1 :]
        sampled = first.sample(index, ["sampler_logprob"]).columns["sampler_logprob"][start:]
        assert np.allclose(sampled, expected.numpy(), atol=2e-5)
        row = json.loads((ran.parent / "prompts.jsonl").read_text().splitlines()[int(first.rows[index]) - 1])
        answer = tokenizer.decode(ids[start:], skip_special_tokens=True)
        commas, length = answer.count("e") + row["bonus"], None if "q" in answer else len(answer) / 10
        by_function = [first.extra[f"reward_{name}"][index] for name in ("commas", "reward")]
        assert np.allclose(by_function, [commas, np.nan if length is None else length], equal_nan=True)
        scores.append(commas + (0.0 if length is None else 0.5 * length))
    assert np.allclose(first.extra["reward"], scores, atol=1e-6)
    for start, end in zip(first.unit_offsets, first.unit_offsets[1:], strict=False):
        own = np.array(scores[start:end])
        assert end - start == 3, "a unit is all answers to one prompt"
        assert len(set(first.rows[start:end])) == 1
        for index, advantage in enumerate((own - own.mean()) / (own.std(ddof=1) + 1e-4), start=int(start)):
            values = first.sample(index, ["advantage"]).columns["advantage"]
            assert np.allclose(values[first.sample(index).loss_mask], advantage, atol=1e-4)
    assert [record.round for record in log.rounds] == [1, 2]
    assert [record.step for record in log.rounds] == [0, 2]
    assert log.rounds[0].reward == pytest.approx(np.mean(scores), abs=1e-6), "no group was without a signal"
    assert [record.step for record in log.steps] == [1, 2, 3, 4]
    assert [record.num_steps for record in log.steps] == [4] * 4
    # at step 2 of 4, the steps and the sampling of a second round are left
    first, step = log.rounds[0], log.steps[1]
    assert step.eta_s - step.elapsed_s > first.sample_s + first.score_s
    # the first step of a round is taken by the weights that sampled it
    mismatch = [step.metrics["mismatch/max"] for step in log.steps]
    assert max(mismatch[0], mismatch[2]) < 1 + 1e-4 < mismatch[1]
    assert [record.step for record in log.held_out] == [0, 2, 4]
    assert log.held_out[0].num_answers == 2
    assert not any(event["kind"] == "unscored" for event in log.events), "`commas` scores what `reward` does not"


def test_two_ranks_sample_and_learn_what_one_does(ran, world):
    config = world("ranks", gpus=2, strategy="ddp", rollout={"temperature": 0.8})
    run_ranks(config, world.root)
    with pytest.raises(UsageError, match="2 ranks"):
        replay(world.root / "ranks", 4, ConsoleCallback())
    for one, other in zip(stores(ran), stores(world.root / "ranks"), strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.rows, other.rows)
        assert np.allclose(one.extra["reward"], other.extra["reward"])
        assert np.allclose(one.extra["sampler_logprob"], other.extra["sampler_logprob"], atol=1e-5)
    assert_same_end(ran, world.root / "ranks", atol=2e-5)


def run_ranks(config, root):
    file = root / "run.yaml"
    file.write_text(dump_config(config))
    process = start(file, root / "ranks.log")
    assert process.wait(600) == 0, (root / "ranks.log").read_text()


def start(file, log):
    return WarmProcess(["-m", "flatout", "train", str(file)], os.environ, log)


def journal_lines(folder):
    return sum(len(path.read_text().splitlines()) - 1 for path in folder.glob("rollouts/.round-*/rank-*.journal"))


# what has happened by the time of a kill
MOMENTS = {
    "sampling": lambda folder: journal_lines(folder) >= 2,
    "scoring": lambda folder: journal_lines(folder) >= 5,
    "the first round": lambda folder: (folder / "rollouts/round-000001.json").exists(),
    "a save": lambda folder: (folder / "checkpoints/step-1").exists(),
    "the second round": lambda folder: (folder / "rollouts/round-000002.json").exists(),
    "the third step": lambda folder: (folder / "checkpoints/step-3").exists(),
}


def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bits(ran, world):
    """SIGKILL, one after the other: what was sampled and scored is not again, and steps go on."""
    config = world("killed", rollout={"temperature": 0.8})
    file, folder, starts, atol = world.root / "killed.yaml", config.folder, count(), 0.0
    file.write_text(dump_config(config))
    for moment, has_come in MOMENTS.items():
        process = start(file, world.root / f"killed-{next(starts)}.log")
        while process.poll() is None and not has_come(folder):
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) in (-signal.SIGKILL, 0), moment
        if 0 < journal_lines(folder) < 4:
            atol = 2e-5  # the other groups are sampled in smaller batches, which round otherwise
    assert start(file, world.root / "killed.log").wait(600) == 0, (world.root / "killed.log").read_text()
    for one, other in zip(stores(ran), stores(folder), strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.allclose(one.extra["sampler_logprob"], other.extra["sampler_logprob"], rtol=0, atol=atol)
    assert_same_end(ran, folder, atol)
    assert not list(folder.glob("rollouts/.round-*")), "journals leave with their rounds"


@pytest.mark.exhaustive
def test_a_stop_while_scoring_and_a_lost_disk_cost_no_answer(ran, world):
    """The mirror has the journal of the round, and the answers of the one before."""
    slow = "import pathlib, time\n" + REWARDS.replace(
        "return float(", f"time.sleep(pathlib.Path({str(world.root / 'slow')!r}).exists())\n    return float("
    )
    (world.root / "slow.py").write_text(slow)
    rewards = [f"{world.root}/slow.py:commas", {"path": f"{world.root}/slow.py:reward", "weight": 0.5}]
    rollout, mirror = {"temperature": 0.8, "rewards": rewards}, {"mirror": f"file://{world.root}/store"}
    config = world("mirrored", rollout=rollout, checkpoint=mirror)
    file, folder, log = world.root / "mirrored.yaml", config.folder, world.root / "mirrored.log"
    file.write_text(dump_config(config))
    process = start(file, log)
    while journal_lines(folder) < 4 or not (world.root / "slow").exists():
        if (folder / "rollouts/round-000001.json").exists():
            (world.root / "slow").touch()
        assert process.poll() is None, log.read_text()
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == PreemptedError.exit_code
    assert journal_lines(folder) == 4
    shutil.rmtree(folder)
    (world.root / "slow").unlink()
    assert start(file, log).wait(600) == 0, log.read_text()
    assert "12 of 12 answers from the journal" in log.read_text()
    for one, other in zip(stores(ran), stores(folder), strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
    assert_same_end(ran, folder)


def two_ranks(world, name, code):
    """Start two ranks of a run with a reward of this code."""
    (world.root / f"{name}.py").write_text(f"import os, time\n{code}\ndef one(answer, row):\n    time.sleep(1)\n")
    config = world(name, strategy="ddp", rollout={"rewards": [f"{world.root}/{name}.py:one"]}, eval={"every_steps": 4})
    (file := world.root / f"{name}.yaml").write_text(dump_config(config))
    words = ["-m", "flatout", "train", str(file)]
    return config.folder, start_warm_ranks(2, lambda rank: words, world.root / f"{name}-logs")


def test_a_stop_of_one_rank_ends_the_scoring_of_all(world):
    folder, ranks = two_ranks(world, "stopped", "")
    while journal_lines(folder) < 4:
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGTERM)
    assert [rank.wait(60) for rank in ranks] == [PreemptedError.exit_code] * 2
    assert journal_lines(folder) == 4, "nothing was scored to its end"


def test_a_reward_that_one_rank_cannot_use_ends_all(world):
    """The first one that imports it can; `stopped` above is the twin."""
    _, ranks = two_ranks(world, "unusable", f"os.close(os.open('{world.root}/used', os.O_CREAT | os.O_EXCL))")
    assert [rank.wait(60) for rank in ranks] == [UsageError.exit_code] * 2


def test_a_step_is_replayed_to_the_bit_and_a_difference_is_named(ran, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(ran, run)
    assert main(["replay", str(run), "--step", "4"]) == 0
    said = capsys.readouterr().out
    assert foreign_entries(run) == []
    assert "step 4: equal" in said
    assert "after step 4: equal" in said
    for step in (1, 2, 3):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    lines = (run / "metrics.jsonl").read_text()
    loss = load(run).log.steps[2].loss
    (run / "metrics.jsonl").write_text(lines.replace(json.dumps(loss), json.dumps(loss * 1.0000001 + 1e-9)))
    assert main(["replay", str(run), "--step", "4"]) == 5
    assert "step 3: loss was" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "9"]) == 2


def test_a_run_that_has_not_sampled_has_a_plan_of_its_rounds_and_no_step_to_verify(world, capsys):
    """`format: rollouts` is verified in test_policy.py."""
    file = world.root / "verified.yaml"
    file.write_text(dump_config(world("verified")))
    assert main(["verify", str(file)]) == 2
    assert "flatout replay" in capsys.readouterr().err
    assert main(["plan", str(file), "--tokens-per-s", "100"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in out.replace("\n" + 18 * " ", " ").splitlines())
    assert rows["steps"].split() == ["4"]
    assert rows["answers"].split() == ["24"]
    assert "2 rounds of 4 prompts with 3 answers each, 2 steps a round" in rows["rounds"]
    assert "8 prompts, 2 held out" in rows["rounds"]
    assert f"{4 * 2 * 3 * 6} of them sampled" in rows["tokens"]
    assert all("at most" in rows[name] for name in ("tokens", "compute", "time"))
    assert {"memory per rank", "while sampling"} <= rows.keys()
    assert main(["plan", str(file), "--step", "3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "step 3, round 2: at most 2 prompts with 6 answers in all, which the round samples" in said
    assert main(["plan", str(file), "--step", "3", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert (step["round"], step["most_answers"], step["most_tokens"]) == (2, 6, 6 * step["most_tokens_with_prompt"])
    assert "sample_ids" not in step, "nobody knows them"
    # these mean nothing before answers are there
    assert not any(word in out for word in ("units", "balance", "padding", "prefixes", "samples"))
    assert main(["plan", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rounds"] == {"num_rounds": 2, "prompts": 4, "group": 3, "steps": 2, "num_prompts": 8}
    (world.root / "odd.py").write_text("def odd(text): return 1")
    for reward in ("absent.py:odd", "odd.py:absent", "odd.py:odd"):
        file.write_text(dump_config(world("verified", rollout={"rewards": [f"{world.root}/{reward}"]})))
        assert main(["plan", str(file)]) == 2
        assert reward.partition(":")[0] in capsys.readouterr().err


def test_rounds_are_a_runs_own_so_that_a_restart_moves_them_away(ran):
    assert foreign_entries(ran) == []
    (mine := ran / "rollouts" / "mine.txt").write_text("")
    assert foreign_entries(ran) == [mine]
    mine.unlink()


def test_rounds_and_their_answers_are_listed(ran, capsys):
    assert main(["rollouts", str(ran)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4, "a head, two rounds, and the last evaluation"
    assert main(["rollouts", str(ran), "--round", "2", "--best", "1", "--worst", "1"]) == 0
    for record in load(ran).log.held_out:
        held_out = [one.reward for one in record.shown]
        assert record.reward_stderr == pytest.approx(np.std(held_out, ddof=1) / len(held_out) ** 0.5)
    answers = load(ran).rollouts(2)
    # what the function returned, and not what 32 bits keep of it
    for one in answers.answers:
        assert one.rewards["reward"] == (None if "q" in one.answer else len(one.answer) / 10)
    rewards = [one.reward for one in answers.answers]
    assert rewards == sorted(rewards, reverse=True)
    assert answers.best(1)[0].reward == rewards[0]
    tokenizer = AutoTokenizer.from_pretrained(load(ran).config.model.name)
    for one in answers.answers:
        assert tokenizer.decode(one.token_ids, skip_special_tokens=True) == one.answer
        assert one.ending == "stop" or (one.ending, len(one.token_ids)) == ("length", 6)
    own = {one.prompt: [other for other in answers.answers if other.prompt == one.prompt] for one in answers.answers}
    for group in own.values():
        advantages = [one.advantage for one in group]
        assert advantages == sorted(advantages, reverse=True), "by reward"
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
    assert f"reward {rewards[0]:.4g} (commas" in capsys.readouterr().out
    assert main(["rollouts", str(ran), "--round", "3"]) == 2
    log = load(ran).log
    assert log.start.plan.num_label_tokens == 2 * 2 * 2 * 3 * 6, "of every answer as long as it may be"
    assert log.start.plan.num_tokens > sum(step.num_tokens for step in log.steps) > 0


def test_a_round_without_a_signal_changes_nothing_and_is_counted(world, tiny):
    """The only prompt is answered twice in each of two rounds by the same weights, by draws of its own each time."""
    file, rows = world.root / "same.py", world.root / "one.jsonl"
    file.write_text("def same(answer, row):\n    return 1.0\n")
    rows.write_text('{"prompt": "Count up"}\n')
    config = world(
        "same", rollout={"rewards": [f"{file}:same"], "prompts": 2}, data={"sources": [{"path": str(rows)}]},
        eval={"fraction": 0.0, "every_steps": None}, log_every_steps=4,
    )  # fmt: skip
    train(config)
    log = load(world.root / "same").log
    assert [record.num_recorded for record in log.steps] == [4], "over both rounds"
    assert [record.no_signal_share for record in log.rounds] == [1.0, 1.0]
    assert [record.num_trained for record in log.rounds] == [0, 0]
    skipped = [event["why"] for event in log.events if event["kind"] == "skipped"]
    assert skipped == ["all rewards of each group were equal, so there was nothing to learn from"] * 4
    assert [(step.loss, step.lr, step.grad_norm, step.metrics) for step in log.steps] == [(None, None, None, {})]
    answers = [sorted(one.answer for one in record.shown) for record in log.rounds]
    assert [len(each) for each in answers] == [6, 6]
    assert answers[0] != answers[1]
    before = load_file(tiny.model_dir / "model.safetensors")
    assert all(torch.equal(value, final(world.root / "same")[name]) for name, value in before.items())
    assert "no step changed the model: all rewards of each group were equal, so" in summarize(log).warnings[0]


def test_answers_that_nothing_scores_are_shown(world, capsys):
    (world.root / "silent.py").write_text("def silent(answer, row):\n    return None\n")
    rollout = {"rounds": 1, "steps": 1, "prompts": 2, "rewards": [f"{world.root}/silent.py:silent"]}
    folder = world.root / "silent"
    train(world("silent", rollout=rollout, eval={"every_steps": 1}))
    capsys.readouterr()
    assert main(["rollouts", str(folder), "--round", "1", "--best", "2"]) == 0
    said, log = capsys.readouterr().out, load(folder).log
    assert "no answer was scored, so there was nothing to learn from; its record has 6 of 6 answers" in said
    assert said.count("--- not scored (silent -)") == 5
    assert f">>> {printable(log.rounds[0].shown[4].answer.strip())}" in said
    assert [(one.reward, one.reward_stderr, len(one.shown)) for one in log.held_out] == [(None, None, 2)] * 2
    assert "not scored (silent -)" in run_fragment(log)


@pytest.mark.parametrize("last", ["", "    return 0.0\n"])
def test_a_reward_that_returns_none_for_wrong_answers_is_told_and_its_twin_learns(world, last, capsys):
    name = "zero" if last else "none"
    (world.root / f"{name}.py").write_text(
        f"def right(answer, row):\n    if 'e' in answer:\n        return 1.0\n{last}"
    )
    rewards = {"rounds": 1, "rewards": [f"{world.root}/{name}.py:right"]}
    (file := world.root / f"{name}.yaml").write_text(dump_config(world(name, rollout=rewards)))
    assert main(["train", str(file)]) == 0
    said, log = " ".join(capsys.readouterr().out.split()), load(world.root / name).log
    (found,), is_told = log.rounds, not last
    assert main(["rollouts", str(world.root / name), "--round", "1"]) == 0
    shown = capsys.readouterr().out
    assert ("no answer of round 1 was trained: all rewards of each group were equal or missing" in shown) == is_told
    assert f">>> {printable(found.shown[0].answer.strip())}" in shown
    told = [event["why"] for event in log.events if event["kind"] == "unscored"]
    assert (len(told), "no step changed the model" in said, "unscored" in said) == (is_told, is_told, is_told)
    if last:
        assert {one.num_unscored for one in (found, *log.held_out)} == {0}
        assert found.num_trained
        assert 0 < found.reward < 1
        return
    assert told[0] in summarize(log).warnings
    assert (found.reward, found.no_signal_share, found.num_trained) == (1.0, 1.0, 0)
    assert 0 < found.num_unscored < 12
    assert f"{found.num_unscored} of 12 unscored" in said
    assert f"{log.held_out[0].num_unscored} of 2 unscored" in said
    assert "returned None for the others; if it means 0, return 0.0" in said
    with pytest.raises(UsageError, match=r"no answer of round 1 was trained.*run.log.rounds\[0\].shown"):
        load(world.root / name).rollouts(1)


def copied(ran, world, name, gone):
    """A run like `ran` that goes on without these checkpoints, and without its end."""
    shutil.copytree(ran, world.root / name)
    for path in ("final", *(f"checkpoints/step-{step}" for step in gone)):
        shutil.rmtree(world.root / name / path)
    return world(name, rollout={"temperature": 0.8})


DAMAGES = {
    "store": ("round-000002/token_ids.npy", lambda content: "damaged"),
    "key": ("round-000002.json", lambda content: json.dumps({"record": json.loads(content)["record"]})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_answers_are_sampled_again_before_their_first_step_and_missed_after_it(ran, world, damage, capsys):
    """A replay, which samples nothing, refuses them."""
    again, missed = (copied(ran, world, f"{damage}-{gone}", gone) for gone in ((3, 4), (4,)))
    for config in (again, missed):
        file, damaged = config.folder / "rollouts" / DAMAGES[damage][0], DAMAGES[damage][1]
        file.write_text(damaged(file.read_text(errors="replace")))
    assert main(["replay", str(again.folder), "--step", "3"]) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert "round 2 needs its answers, as a replay" in said
    assert f"{again.folder}/rollouts/round-000002" in said, "not of the folder that is gone now"
    train(again)
    assert_same_end(ran, again.folder)
    with pytest.raises(CheckpointError, match="round 2") as refused:
        train(missed)
    assert f"remove {missed.folder}/checkpoints/step-3," in str(refused.value)
    assert "rebuild" not in f"{said} {refused.value}"


@pytest.mark.parametrize(
    ("changed", "differs"),
    [("nothing", None), ("optim", "optim.lr"), ("rewards", "rewards.py of the rewards"),
     ("version", "the version of flatout")],
)  # fmt: skip
def test_a_start_before_the_first_checkpoint_takes_its_own_answers_and_none_of_others(
    ran, world, changed, differs, capsys
):
    """Others are those of weights that learnt at another rate, of other rewards, and of a flatout without a setting.

    A start says what differs, and samples again; a replay only says it.
    """
    folder = copied(ran, world, f"first-{changed}", (1, 2, 3, 4)).folder
    (folder / "rewards.py").write_text("def commas(answer, row):\n    return 1.0 * len(answer)\n")
    files = sorted(folder.glob("rollouts/round-*.json"))
    before = [file.stat().st_mtime_ns for file in files]
    rewards = {"rewards": [f"{folder}/rewards.py:commas"]} if changed == "rewards" else {}
    optim = {"optim": {"lr": 1e-3}} if changed == "optim" else {}
    if changed == "version":
        files[0].write_text(files[0].read_text().replace('"rollout.temperature"', '"rollout.heat"'))
        before[0] = files[0].stat().st_mtime_ns
    config = world(folder.name, rollout={"temperature": 0.8, **rewards}, **optim)
    (folder / "config.yaml").write_text(dump_config(config))
    capsys.readouterr()
    code = main(["replay", str(folder), "--step", "2"])
    assert code == (CheckpointError.exit_code if differs else 0)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert differs is None or differs in capsys.readouterr().err
    train(config)
    assert ([file.stat().st_mtime_ns for file in files] == before) == (changed == "nothing")
    again = [event["why"] for event in load(folder).log.events if event["kind"] == "round_again"]
    assert differs in again[0] if differs else not again


def test_a_journal_is_taken_or_what_differs_is_said(world, capsys):
    code = f"""from pathlib import Path
def late(answer, row):
    assert Path("{world.root}/mended").exists()
    return len(answer)
"""
    (file := world.root / "late.py").write_text(code)
    rollout = {"rewards": f"{file}:late", "rounds": 1}
    config = world("late", rollout=rollout, eval={"fraction": 0.0, "every_steps": None})
    with pytest.raises(UsageError, match=r"late\.py:3"):
        train(config)
    assert "journal" not in capsys.readouterr().out
    file.write_text(code + "# changed\n")
    # left by another rank of a start with two
    journal = config.folder / "rollouts/.round-000001/rank-0.journal"
    journal.rename(journal.with_name("rank-1.journal"))
    with pytest.raises(UsageError, match=r"late\.py:3"):
        train(config)
    assert "round_again" in capsys.readouterr().out
    (world.root / "mended").touch()
    train(config)
    said = capsys.readouterr().out
    assert "12 of 12 answers from the journal" in said
    log = load(config.folder).log
    (again,) = [event["why"] for event in log.events if event["kind"] == "round_again"]
    assert "late.py of the rewards" in again
    assert [record.new_tokens_per_s for record in log.rounds] == [None]
    # with a checkpoint, other scores are for the person to allow
    shutil.rmtree(config.folder / "final")
    shutil.rmtree(config.folder / "checkpoints/step-2")
    file.write_text(code)
    with pytest.raises(CheckpointError, match=r"rewards: .*changes the scores") as refused:
        train(config)
    allowed = [fix.settings for fix in refused.value.fixes if "checkpoint.allow_change" in fix.settings]
    assert allowed == [{"checkpoint.allow_change": ["rewards"]}]
    train(config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"allow_change": ["rewards"]})}))


@pytest.mark.parametrize(
    ("sections", "names", "fix"),
    [
        ({"rollout": {"rewards": []}}, "rewards", None),
        ({"rollout": {"steps": 5}}, "steps", {"rollout.steps": 1}),
        ({"rollout": {"rounds": None}}, "rollout", {"rollout.rounds": 100}),
        ({"batch": {"samples_per_step": 8}}, "batch.samples_per_step", None),
        ({"batch": {"max_steps": 8}}, "batch.max_steps", None),
        ({"eval": {"fraction": 0.0, "data": "other"}}, "eval.data", None),
    ],
)
def test_settings_that_rounds_do_not_read_are_refused(world, sections, names, fix):
    """The run of `ran` is the accepting twin of all."""
    with pytest.raises(UsageError) as refused:
        world("refused", **sections)
    assert names in str(refused.value)
    if fix is not None:
        assert fix in [one.settings for one in refused.value.fixes]


@pytest.mark.parametrize(
    ("sections", "fix"),
    [
        ({"objective": "cross_entropy"}, {"objective": "grpo"}),
        ({"objective": {"kind": "grpo", "temperature": 0.5}}, {"rollout.temperature": 0.5}),
        ({"strategy": "fsdp"}, {"strategy": "ddp"}),
        ({"objective": {"kind": "grpo", "kl": 0.1}}, {"method": "lora"}),
        ({"rollout": {"group": 1}}, {"rollout.group": 8}),
        ({"rollout": {"group": 1}, "objective": "rloo"}, {"objective.advantage": "batch_mean"}),
        ({"rollout": {"group": 1, "prompts": 1, "steps": 1}, "objective": "reinforce"}, {"rollout.group": 8}),
        ({}, None),
        ({"rollout": {"group": 1}, "objective": "reinforce"}, None),
        ({"rollout": {"group": 1, "prompts": 1, "steps": 1}, "objective": {"kind": "grpo", "advantage": "none"}}, None),
    ],
)
def test_a_run_that_cannot_learn_from_its_answers_is_refused_before_it_samples(world, sections, fix):
    """Twins without a fix plan for two ranks."""
    if fix is None:
        open_and_plan(world("planned", **sections), Reporter(), Rank(0, 2))
        return
    with pytest.raises(UsageError) as refused:
        open_and_plan(world("refused", **sections), Reporter(), Rank(0, 2))
    assert fix in [one.settings for one in refused.value.fixes]


def test_lost_prompts_and_few_held_out_ones_are_planned_with_their_settings(world, capsys):
    """As many as are usual, and whole, are not told."""
    file, rows = world.root / "told.yaml", world.root / "many.jsonl"
    many = [{"prompt": f"Count up {number}", "bonus": 0} for number in range(60)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*many, {"prompt": "Count " * 40, "bonus": 0}]))
    sections = {"data": {"sources": [{"path": str(rows)}]}, "eval": {"fraction": 0.5}}
    file.write_text(dump_config(world("told", **sections)))
    assert main(["plan", str(file), "--json"]) == 0
    assert main(["plan", str(file)]) == 0
    said = capsys.readouterr().out
    assert not any(name in said for name in ("max_prompt_tokens", "too_long", "eval.fraction"))
    file.write_text(
        dump_config(world("told", **{**sections, "eval": {"fraction": 0.02}}, rollout={"max_prompt_tokens": 30}))
    )
    assert main(["plan", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "too_long 1, rows 61, try rollout.max_prompt_tokens=" in said
    assert "1 held-out prompt (eval.fraction=0.02)" in said
    file.write_text(dump_config(world("told", **sections, rollout={"max_prompt_tokens": 1})))
    assert main(["plan", str(file)]) == 3
    said = capsys.readouterr().err
    assert "no prompts are left of 61: 61 were longer than rollout.max_prompt_tokens" in said


def test_a_lora_run_samples_with_its_adapter(world, tiny, capsys):
    """With a reward of ours and a policy loss of a person's own; the first step agrees with the sampler."""
    (file := world.root / "mine.py").write_text(
        "from flatout.objectives.policy import DrGRPO\n\nclass Mine(DrGRPO):\n    clip_high: float = 0.3\n"
    )
    config = world(
        "lora", method="lora", lora={"rank": 4}, objective={"path": f"{file}:Mine"}, optim={"lr": 1e-2},
        rollout={"rounds": 2, "rewards": [{"kind": "length", "max_tokens": 3}]}, eval={"every_steps": 1},
    )  # fmt: skip
    train(config)
    capsys.readouterr()
    assert main(["rollouts", str(config.folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["1", "0"], ["-", "1"], ["2", "2"], ["-", "3"], ["-", "4"]]
    log = load(config.folder).log
    for step in (log.steps[0], log.steps[2]):
        if step.num_label_tokens:
            assert step.metrics["mismatch/max"] == pytest.approx(1, abs=1e-4)
    assert set(log.rounds[0].metrics) == {"reward/length"}


@pytest.mark.parametrize("setting", ["continue_from", "init_path"])
def test_a_round_is_of_the_content_that_its_first_adapter_has(ran, world, tiny, setting):
    """Its file keeps its name. With the same content, the round is not sampled again."""
    (start := world.root / "start.py").write_text("def start(place, generator):\n    return place.weight()[:4] * 0\n")
    first = world.root / "adapter"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny.model_dir), LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"])
    )
    model.save_pretrained(first)
    begins = {"continue_from": str(first)} if setting == "continue_from" else {"init_path": f"{start}:start"}
    config = world(
        setting, method="lora", lora={"rank": 4, "targets": ["q_proj"], **begins}, eval={"every_steps": None},
        rollout={"rounds": 1, "steps": 1},
    )  # fmt: skip

    def samples_again():
        shutil.rmtree(config.folder / "final", ignore_errors=True)
        shutil.rmtree(config.folder / "checkpoints", ignore_errors=True)
        train(config)
        return [event["why"] for event in load(config.folder).log.events if event["kind"] == "round_again"]

    assert samples_again() == samples_again() == []
    start.write_text(start.read_text().replace("0", "1"))
    model.load_adapter(first, "default")
    for parameter in model.parameters():
        parameter.data += 1e-3
    model.save_pretrained(first)
    (why,) = samples_again()
    assert ("adapter_model.safetensors" if setting == "continue_from" else "start.py") in why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
@pytest.mark.parametrize("has_room", [True, False])
def test_decoding_steps_are_recorded_once_a_run_where_memory_has_room_beside_steps(world, has_room, monkeypatch):
    """Else once a round. The weights of each round are read, as its first step agrees with the sampler."""
    made = list[int]()

    class Counted(torch.cuda.CUDAGraph):
        def __new__(cls, *args, **kwargs):
            made.append(len(load(config.folder).log.rounds))
            return super().__new__(cls, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)
    if not has_room:
        # from the first recording on, as the run is planned for the memory that is free before
        free = torch.cuda.mem_get_info
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 1) if made else free(device))
    config = world(
        f"room-{has_room}", device="cuda", method="lora", lora={"rank": 4}, optim={"lr": 1e-2},
        model={"precision": "bf16"}, compile="off", eval={"every_steps": None},
        rollout={"rounds": 3, "steps": 1, "max_new_tokens": 40},
    )  # fmt: skip
    train(config)
    # held-out prompts after the last round take some too
    assert set(made) == ({0} if has_room else {0, 1, 2, 3})
    trained = [step for step in load(config.folder).log.steps if step.num_label_tokens]
    assert len(trained) == 3
    assert all(step.metrics["mismatch/k3"] < 1e-2 for step in trained)


def test_the_reference_of_every_round_is_the_model_at_step_0_also_after_a_resume(world):
    def kls(name, **rollout):
        config = world(
            name, method="lora", lora={"rank": 4}, objective={"kind": "grpo", "kl": 0.1}, optim={"lr": 1e-2},
            rollout={"temperature": 0.8, **rollout},
        )  # fmt: skip
        train(config)
        return [one.metrics["kl/reference"] for one in load(config.folder).log.steps if one.num_label_tokens]

    first, *others = found = kls("kl")
    assert len(found) == 4
    assert abs(first) < 1e-10 < 1e-7 < min(others)
    shutil.copytree(world.root / "kl", world.root / "kl-resumed")
    for name in ("checkpoints/step-4", "checkpoints/step-2", "final"):
        shutil.rmtree(world.root / "kl-resumed" / name)
    assert kls("kl-resumed") == found
    assert load(world.root / "kl-resumed").log.start.resumed_step == 3


def test_a_reward_model_scores_answers_as_plain_transformers_does(world, tiny, capsys):
    """One of another tokenizer, beside a function; also held out, in the plan, and refused if it is none."""
    from flatout.cli.main import main

    pairs = world.root / "pairs.jsonl"
    rows = [{"prompt": f"{QUESTIONS[n % 6]} {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge, base = world.root / "judge", ["device=cpu", "model.precision=fp32", "schedule.warmup_steps=0"]
    trained = [f"model={tiny.model_dir}", f"data={pairs}", f"data.root={world.root}/judged", f"run_dir={judge}"]
    assert main(["train", *trained, *base, "objective=reward", "optim.lr=0.01", "batch.max_steps=2"]) == 0
    rewards = [{"kind": "model", "path": str(judge / "final")}, {"kind": "length", "max_tokens": 3, "weight": 0}]
    config = world("judged", rollout={"rewards": rewards})
    train(config)
    log, final = load(config.folder).log, judge / "final"
    assert set(log.held_out[0].metrics) == set(log.rounds[0].metrics) == {"reward/model", "reward/length"}
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = AutoModelForSequenceClassification.from_pretrained(tiny.model_dir, config=AutoConfig.from_pretrained(final))
    model.load_adapter(str(final))
    store, asked = stores(config.folder)[0], (world.root / "prompts.jsonl").read_text().splitlines()
    for index in range(store.num_samples):
        ids, mask = store.sample(index).pair
        answer = tokenizer.decode(ids[mask], skip_special_tokens=True)
        chat = [{"role": "user", "content": json.loads(asked[store.rows[index] - 1])["prompt"]}]
        chat.append({"role": "assistant", "content": answer})
        read = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        assert store.extra["reward_model"][index] == pytest.approx(model.eval()(read).logits.item(), abs=1e-6)
    assert len(set(store.extra["reward"])) > 6
    capsys.readouterr()
    assert main(["rollouts", str(config.folder), "--round", "1"]) == 0
    assert "(model" in capsys.readouterr().out
    (world.root / "judged.yaml").write_text(dump_config(config))
    assert main(["plan", str(world.root / "judged.yaml"), "--device", "h200"]) == 0
    assert "reward models" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no reward model"):
        train(world("refused", rollout={"rewards": [{"kind": "model", "path": str(tiny.model_dir)}]}))
    assert not list((world.root / "refused").glob("rollouts/*"))
