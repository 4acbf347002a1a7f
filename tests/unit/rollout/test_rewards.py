"""Reward functions in child processes: what a person's code may do, what it returns, and what is counted."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from flatout.config.rewards import RewardConfig, RewardList
from flatout.data.conversation import Origin
from flatout.data.prompts import RunPrompt
from flatout.errors import UsageError
from flatout.rollout.rewards.pool import Item, Rewards

# name -> what the function does for the answer "bad"; any other answer scores 1
HOSTILE = {
    "nan": "return float('nan')",
    "infinite": "return -1e308 * 10",
    "text": "return '1.0'",
    "of_bytes": "return b'1'",
    "boolean_list": "return [True]",
    "nothing_of_use": "return {'reward': 1}",
    "imaginary": "return 1j",
    "huge_number": "return 10 ** 400",
    "huge_text": "return 'x' * 50_000_000",
    "two_numbers": "import numpy; return numpy.ones(2)",
    "endless_generator": "return iter(int, 1)",
    "raises": "raise ValueError('no')",
    "raises_long": "raise ValueError('y' * 10_000_000)",
    "raises_without_text": "raise Unprintable",
    "base_exception": "raise BaseException('base')",
    "interrupts": "raise KeyboardInterrupt",
    "exits": "import sys; sys.exit(0)",
    "exits_at_once": "import os; os._exit(0)",
    "generator_exit": "raise GeneratorExit",
    "stops_iteration": "raise StopIteration",
    "recursion": "return recursion(answer, row)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "kills_itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills_its_group": "import os, signal; os.killpg(0, signal.SIGTERM)",
    "memory": "return len(bytearray(8 << 30))",
    "list_memory": "return len([0] * (1 << 31))",
    "hangs": "import time; time.sleep(1000)",
    "loops": "while True: pass",
    "hangs_in_c": "import re; return re.match('(a+)+$', 'a' * 60 + 'b')",
    "closes_everything": "os.closerange(3, max(own_fds()) + 1); return 1",
    "writes_everywhere": "write_everywhere(b'{}]'); return 1",
    "writes_lines_of_json": "write_everywhere(b'[[2.0]]\\n'); return 1",
    "reads_input": "return float(input())",
    "missing_column": "return row['label']",
    "bad_number": "return Odd()",
    "numpy_nan": "import numpy; return numpy.float32('nan')",
    "coroutine_of_nothing": "return (yielded async for yielded in never())",
    "never_ends": "return never()",
    "ignores_its_end": "return stubborn()",
    "exits_in_a_loop": "return exits_later()",
    "forks_and_returns": "os.fork(); return float('nan')",
    "forks_and_dies": "os.fork() or time.sleep(1000); os._exit(4)",
    "many_children": "[subprocess.Popen(['sleep', '1000']) for _ in range(20)]; time.sleep(1000)",
    "stops_itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "ends_by_its_timer": "signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(1000)",
    "unknown_signal": "os.kill(os.getpid(), 37)",
    "ignores_signals": "[signal.signal(each, signal.SIG_IGN) for each in (1, 2, 14, 15)]; time.sleep(1000)",
    "replaces_json": "import json; json.dumps = None; return 1",
    "floods": "print('x' * 10_000_000); return None + 1",
    "group_of_errors": "raise BaseExceptionGroup('all', [KeyboardInterrupt(), ValueError()])",
    "closed_loop": "asyncio.new_event_loop().close(); asyncio.get_running_loop()",
}
# what looks as odd, and is a score
HARMLESS = {
    "boolean": "return True",
    "numpy_scalar": "import numpy; return numpy.bool_(True)",
    "decimal": "import decimal; return decimal.Decimal('1.0')",
    "lingers": "threading.Thread(target=time.sleep, args=(1000,)).start(); return 1",
    "leaves_handlers": "signal.signal(signal.SIGALRM, lambda *_: 1 / 0); return 1",
    "leaves_children": "subprocess.Popen(['sleep', '1000']); return 1",
    "leaves_its_folder": "os.chdir('/'); return 1",
}
FILE = '''
import asyncio, os, signal, subprocess, threading, time
async def never(): await asyncio.Event().wait()
async def stubborn():
    while True:
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: pass
async def exits_later(): raise SystemExit(0)
class Unprintable(Exception):
    def __str__(self): raise RuntimeError
class Odd:
    def __float__(self): raise TypeError("odd")
def own_fds(): return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]
def write_everywhere(content):
    for fd in own_fds():
        try: os.write(fd, content)
        except OSError: pass
print("this is no protocol", flush=True)
''' + "".join(
    f"def {name}(answer, row):\n    print(answer, flush=True)\n    if answer != 'bad': return 1\n    {body}\n"
    for name, body in (HOSTILE | HARMLESS).items()
)  # fmt: skip


def items(*answers, row=None, is_text=True, row_number=7):
    row = {"answer": "4", "number": 2} if row is None else row
    turns = ({"role": "user", "content": "2 + 2?"},)
    prompt = RunPrompt((), turns, row, Origin("rows.jsonl", row_number), is_text)
    return [Item(prompt, answer, [1, 2, 3]) for answer in answers]


def configs(*rewards):
    return TypeAdapter(RewardList).validate_python(list(rewards))


def score(folder, rewards, scored, num_procs=1, **options):
    lines = []
    with Rewards(configs(*rewards), folder / "rewards.log", num_procs=num_procs, log=lines.append) as pool:
        return pool.score(scored, **options), lines


def test_the_table_is_long_enough():
    assert len(HOSTILE) >= 30


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.py").write_text(FILE)
    common = {"seconds": 2, "memory_gb": 2, "on_error": "skip"}
    rewards = [{"path": f"{folder / 'hostile.py'}:{name}", **common} for name in HOSTILE | HARMLESS]
    scores, lines = score(folder, rewards, items("good", "bad", "fine"), num_procs=2)
    return scores, lines, (folder / "rewards.log").read_text()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_function_is_named_and_counted_and_harms_no_other_answer(hostile, name):
    scores, lines, _ = hostile
    column = scores.values[:, list(HOSTILE).index(name)]
    np.testing.assert_array_equal(column, [1, math.nan, 1])
    assert scores.problems[name] == 1
    (line,) = [line for line in lines if f"reward {name} (" in line]
    assert "rows.jsonl:7" in line
    assert "'bad'" in line
    assert len(line) < 1000


@pytest.mark.parametrize("name", HARMLESS)
def test_odd_functions_that_give_a_score_have_no_problem(hostile, name):
    scores, _, _ = hostile
    assert scores.values[:, list(HOSTILE | HARMLESS).index(name)].tolist() == [1, 1, 1]


def test_what_functions_print_goes_to_the_log(hostile):
    assert "this is no protocol" in hostile[2]


def test_what_is_not_scored_is_left_out_of_the_sum(hostile):
    scores, _, _ = hostile
    num = len(HOSTILE) + len(HARMLESS)
    np.testing.assert_array_equal(scores.total, [num, len(HARMLESS), num])


FORMS = """
import asyncio, functools, os, time
loops, held = set(), []
def plain(answer, row): return len(answer) * row["number"]
def with_default(answer, row, scale=10): return scale
def trl(prompts, completions, completion_ids, number, **columns):
    assert not {"prompt", "prompts"} & set(columns), columns
    assert len(prompts) == len(completions) == len(completion_ids) == len(number) == len(columns["answer"])
    text = [c if isinstance(c, str) else c[0]["content"] + str(len(prompts[0])) for c in completions]
    return [None if t == "none" else len(t) + 10 * len(completions) for t in text]
def trl_few(completions): return tuple(1 for _ in completions)
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": 1, "who": (data_source, extra_info["split"])}
async def waits(answer, row):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0.2)
    return len(loops)
async def waits_trl(completions, **columns): await asyncio.sleep(0); return [2.0] * len(completions)
async def one_blocks(answer, row):
    if answer == "none": time.sleep(1000)
    return 1
async def one_hangs(answer, row):
    if answer == "none": await asyncio.sleep(1000)
    return 1
runs_a_loop = functools.partial(lambda answer, row: asyncio.run(waits(answer, row)) > 0)
class Scorer:
    def __call__(self, answer, row): return 3
    async def later(self, answer, row): return 4
instance, method = Scorer(), Scorer().later
def needs(completions, solution): return [1] * len(completions)
def too_few(completions, **columns): return [1]
def slow_first(answer, row):
    time.sleep(0.5 if answer == "0" else 0)
    return float(answer)
def none(answer, row): return None
def dies_once(answer, row):
    if not os.path.exists(answer):
        open(answer, "w").close()
        os._exit(3)
    return 1
def grows(answer, row):
    if answer == "none": held.extend(bytearray(1 << 28) for _ in range(64))
    return os.getpid()
def no_form(prompt, response): return 1
def no_row(answer): return 1
def no_tokenizer(answer, row, tokenizer): return 1
not_callable = 3
"""


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    (folder / "forms.py").write_text(FORMS)
    return folder


def named(folder, *names, **settings):
    return [{"path": f"{folder / 'forms.py'}:{name}", "on_error": "skip", "seconds": 2, **settings} for name in names]


def test_known_forms_get_what_their_parameters_say(forms):
    row = {"answer": "4", "number": 2, "data_source": "math", "extra_info": {"split": "train"}, "prompt": "2 + 2?"}
    scored = items("4", "none", "12", row=row | {"reward_model": {"ground_truth": "4"}})
    names = ("plain", "with_default", "trl", "trl_few", "verl", "waits", "waits_trl", "one_hangs")
    names += ("runs_a_loop", "instance", "method", "needs", "too_few", "none")
    scores, _ = score(forms, named(forms, *names) + named(forms, "one_blocks", seconds=0.5), scored)
    nan = math.nan
    expected = [
        [2, 10, 31, 1, 1, 1, 2, 1, 1, 3, 4, nan, nan, nan, 1],
        [8, 10, nan, 1, 0, 1, 2, nan, 1, 3, 4, nan, nan, nan, nan],
        [4, 10, 32, 1, 0, 1, 2, 1, 1, 3, 4, nan, nan, nan, 1],
    ]
    np.testing.assert_array_equal(scores.values, expected)
    assert scores.problems == {"one_blocks": 1, "one_hangs": 1, "needs": 3, "too_few": 3}


def test_a_chat_is_given_as_messages_and_groups_stay_together(forms):
    scored = items("4", is_text=False) + items("4", "none", is_text=False, row_number=8)
    scores, _ = score(forms, named(forms, "trl"), scored)
    np.testing.assert_array_equal(scores.values[:, 0], [12, 22, 25])  # the length of the content and of the prompt


def test_async_calls_wait_together(forms):
    started = time.monotonic()
    scores, _ = score(forms, named(forms, "waits", seconds=100), items(*"a" * 200))
    assert time.monotonic() - started < 200 * 0.2
    assert (scores.values == 1).all()


def test_scores_are_in_the_order_of_the_answers_and_weighted(forms):
    progress = []
    rewards = named(forms, "slow_first", weight=0.5) + named(forms, "plain", weight=-1) + named(forms, "none")
    scored = items(*map(str, range(9)), row={"number": 3})
    scores, _ = score(forms, rewards, scored, num_procs=3, on_progress=progress.append)
    np.testing.assert_array_equal(scores.values[:, 0], range(9))
    np.testing.assert_array_equal(scores.total, np.arange(9) * 0.5 - 3)
    assert scores.values.dtype == scores.total.dtype == np.float64
    assert progress == sorted(progress)
    assert progress[-1] == 9


def test_a_process_that_died_is_started_again(forms, tmp_path):
    lines = []
    with Rewards(configs(*named(forms, "dies_once")), tmp_path / "log", num_procs=1, log=lines.append) as pool:
        first = pool.score(items(str(tmp_path / "a")))
        assert first.problems == {"dies_once": 1}
        assert math.isnan(first.total[0])
        assert "exit code 3" in lines[-1]
        again = pool.score(items(str(tmp_path / "a")))
        assert (again.total == 1).all()
        assert again.problems == {}
        assert pool.score([]).values.shape == (0, 1)


def test_a_process_that_met_its_limit_of_memory_is_replaced(forms):
    scores, lines = score(forms, named(forms, "grows", memory_gb=1, seconds=100), items("4", "none", "5", "6"))
    before, bad, after, later = scores.values[:, 0]
    assert math.isnan(bad)
    assert before != after == later
    assert "MemoryError" in lines[-1]


@pytest.mark.parametrize(("on_error", "expected"), [("zero", [1, 0]), ("skip", [1, math.nan])])
def test_problems_score_as_the_setting_says(forms, tmp_path, on_error, expected):
    rewards = named(forms, "dies_once", on_error=on_error)
    (tmp_path / "there").touch()
    scores, _ = score(tmp_path, rewards, items(str(tmp_path / "there"), str(tmp_path / on_error)))
    np.testing.assert_array_equal(scores.total, expected)
    assert scores.problems == {"dies_once": 1}


def test_a_problem_stops_the_run_by_default(forms, tmp_path):
    reward = named(forms, "too_few", seconds=100)[0]
    del reward["on_error"]
    assert score(tmp_path, [reward], items("4"))[0].total == [1]
    with pytest.raises(UsageError, match=r"too_few.*rows\.jsonl:7.*'4'") as stopped:
        score(tmp_path, [reward], items("4", "5"))
    correct, skip = stopped.value.fixes
    assert not correct.settings, "a setting that hides the fault comes after mending it"
    said = str(stopped.value)
    assert said.index(f"correct {reward['path']}") < said.index("on_error: skip")
    assert "have no score" in said
    with pytest.raises(UsageError) as one_of_two:
        score(tmp_path, [reward, "number"], items("4", "5"))
    assert "the sum of the others" in str(one_of_two.value)
    (asked,) = skip.settings["rollout.rewards"]
    assert score(tmp_path, [asked], items("4", "5"))[0].problems == {"too_few": 2}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("(answer, row): return row['label']", "KeyError: 'label' (own.py:1); the row's columns are: answer, number"),
        ("(completions, label): return [1]", "the row's columns are: answer, number"),
        ("(answer, row): return str(row['number'])", "str '2'"),
        ("(answer, row): return row['number']", None),
    ],
)
def test_a_problem_says_what_the_row_has_and_what_came_back(tmp_path, code, said):
    (tmp_path / "own.py").write_text(f"def reward{code}")
    scores, lines = score(tmp_path, [{"path": f"{tmp_path}/own.py:reward", "on_error": "skip"}], items("4"))
    assert bool(scores.problems) == bool(said)
    assert not said or said in lines[-1]


def one_point(answer, row):
    return 1.0


@pytest.mark.parametrize(
    ("function", "named"), [(one_point, f"{__file__}:one_point"), (lambda answer, row: 1.0, f"{__file__}:FUNCTION")]
)
def test_a_function_in_memory_is_told_its_file(function, named):
    """Its twin is that name."""
    with pytest.raises(ValidationError, match="processes of their own") as refused:
        configs(function)
    assert named in str(refused.value)
    with pytest.raises(ValidationError, match="processes of their own"):
        TypeAdapter(RewardList).validate_python(function)
    if function is one_point:
        assert configs(named)[0].function == named
        assert TypeAdapter(RewardList).validate_python(named) == configs(named)


def test_what_progress_raises_ends_calls_that_hang_and_the_pool_goes_on(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, time\ndef hangs(answer, row):\n"
        "    open(row['pids'], 'a').write(f'{os.getpid()}\\n')\n"
        "    time.sleep(1000 if answer == '4' else 0)\n    return 1"
    )
    pids = tmp_path / "pids"

    def stop(done):
        if pids.exists() and pids.read_text().count("\n") == 2:
            raise InterruptedError

    own = [{"path": f"{tmp_path / 'own.py'}:hangs", "seconds": 1000}]
    row = {"pids": str(pids)}
    with Rewards(configs(*own), tmp_path / "log", num_procs=2, log=lambda line: None) as pool:
        with pytest.raises(InterruptedError):
            pool.score(items("4", "4", "4", "4", row=row), on_progress=stop)
        for pid in map(int, pids.read_text().split()):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert (pool.score(items("5", row=row)).total == 1).all()


@pytest.mark.parametrize("name", ["no_form", "no_row", "no_tokenizer", "not_callable", "absent"])
def test_what_cannot_be_called_is_refused_before_any_answer(forms, tmp_path, name):
    with Rewards(configs(*named(forms, "with_default")), tmp_path / "log", num_procs=1, log=lambda line: None):
        pass
    with pytest.raises(UsageError, match=name) as refused:
        Rewards(configs(*named(forms, name)), tmp_path / "log", num_procs=1, log=lambda line: None).__enter__()
    if name[:2] == "no" and name != "not_callable":
        for parameters in ("(answer, row)", "(prompts, completions, completion_ids, **columns)", "solution_str"):
            assert parameters in str(refused.value)


STARTS = "import flatout; flatout.train(model='none', data='none.jsonl', run_dir='started')"


@pytest.mark.parametrize("code", ["raise SystemExit", "def (", "import os; os._exit(1)", "1 / 0", STARTS])
def test_a_file_that_does_not_load_is_refused(tmp_path, code):
    """A script that starts a run may do so where it is no import."""
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UsageError) as refused:
        score(tmp_path, [f"{tmp_path / 'own.py'}:reward"], items("4"))
    if code == STARTS:
        assert "move the reward to a file of its own" in str(refused.value)
    guarded = f"if __name__ == '__main__':\n    {STARTS}\n" if code == STARTS else ""
    (tmp_path / "own.py").write_text(f"{guarded}def reward(answer, row): return 1")
    assert (score(tmp_path, [f"{tmp_path / 'own.py'}:reward"], items("4"))[0].total == 1).all()


def test_a_file_and_what_it_imports_are_hashed_and_run_as_they_were_read(tmp_path):
    (tmp_path / "beside.py").write_text("SCORE = 2")
    (tmp_path / "own.py").write_text("from beside import SCORE\ndef reward(answer, row): return SCORE")
    pool = Rewards(configs(f"{tmp_path / 'own.py'}:reward"), tmp_path / "log", num_procs=1, log=lambda line: None)
    assert {Path(file).name for file in pool.digests} == {"own.py", "beside.py"}
    (tmp_path / "own.py").write_text("def reward(answer, row): return 5")
    with pool:
        assert (pool.score(items("4")).total == 2).all()


def test_rows_may_hold_what_json_has_not(tmp_path):
    (tmp_path / "own.py").write_text("def reward(answer, row): return row['array'][1] + len(row['path'])")
    row = {"array": np.arange(3), "path": Path("abc")}
    assert (score(tmp_path, [f"{tmp_path / 'own.py'}:reward"], items("4", row=row))[0].total == 4).all()


# ready reward, its settings, row, right answers, wrong answers
FENCED = "Here:\n```{}\n{}\n```\n"
ADD = "def add(a, b):\n    return a + b"
TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
READY = {
    "exact": ("exact", {}, {"answer": "Paris "}, ["Paris", " Paris\n"], ["paris", "It is Paris", ""]),
    "exact by pattern": (
        "exact", {"field": "city", "pattern": r"<answer>(.*?)</answer>"}, {"city": "Paris"},
        ["<answer>Rome</answer> no: <answer> Paris </answer>"], ["Paris", "<answer>Rome</answer>"],
    ),
    "number": (
        "number", {}, {"answer": "She has 3 + 4 = 7 left.\n#### 1,234"},
        ["so 1234", "1,234.0", "#### 1,234", "it is $1,234.", "3 and 1234%", "12.34e2"],
        ["1,234 or 5", "none", "-1234", "1 234", "123,4"],
    ),
    **{
        f"number {right}": ("number", {}, {"answer": right}, alike, others)
        for right, (alike, others) in {
            "0.5": (
                [".5", "1/2", "50e-2", "\\frac{1}{2}", "it is .5."], ["5", "50%", "-.5", "a.5", "1 1/2", "2/1"],
            ),
            "-.5": (["-0.5", "(-.5)", "\u2212.5", "\u20131/2", "-$.50", "$-\\dfrac{1}{2}$"], [".5", "1-.5"]),
            "1,234.5": (["1234.5", "$1,234.50", "1.2345e3", "\\$1,234.5"], ["1,2345", "234.5", "1.234,5"]),
            "1.234e3": (["1234", "1,234.", "2468/2", "1234 m^2", "1234 cm^{3}"], ["1.234", "1.234e-3"]),
            "5": (["$5", "\u20ac5", "5.", "5%", "10/2", "...5", "It is.5", "5/1/5"], ["-5", "5.5", "1/5", "5" * 5000]),
            "1 3/4": (["7/4", "1.75", "1\\frac{3}{4}"], ["3/4", "13/4", "1", "4"]),
        }.items()
    },
    "negative number": ("number", {"field": "n"}, {"n": -5}, ["x=-5", "is \u22125", "(-5)"], ["10-5", "5", "a-5"]),
    "regex": (
        "regex", {"pattern": r"(?s)^<think>.*</think>"}, {}, ["<think>a\nb</think> c"], ["<think>", " <think></think>"],
    ),
    "code": (
        "code", {"seconds": 20}, {"tests": TESTS},
        [
            ADD, FENCED.format("python", ADD), FENCED.format("", "x") + FENCED.format("py", ADD),
            "print('x' * 100_000)\nimport asyncio, ctypes, numpy, random\nasyncio.run(asyncio.sleep(0))\n"
            "open('own.txt', 'w').write('1')\n" + ADD,
        ],
        [
            "", "def add(a, b): return 1", "def (", FENCED.format("", ADD) + FENCED.format("", "x"), "\0",
            "import sys; sys.exit(0)", "import os; os._exit(0)",
            *(f"{refused}\n{ADD}" for refused in (
                "import subprocess; subprocess.run(['true'])", "import os; os.fork()",
                "import socket; socket.create_connection(('127.0.0.1', PORT))", "x = [0] * (1 << 40)",
                "open('/tmp/flatout-not-there', 'w')", "import os; os.remove('KEPT')",
            )),
        ],
    ),
    "code of a list": ("code", {"field": "cases"}, {"cases": TESTS.split("\n")}, [ADD], ["add = max"]),
    "length": ("length", {"min_tokens": 3, "max_tokens": 3}, {}, ["any"], []),
    "shorter": ("length", {"max_tokens": 2}, {}, [], ["any"]),
    "longer": ("length", {"min_tokens": 4, "max_tokens": 9}, {}, [], ["any"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READY)
def test_ready_rewards_tell_right_from_wrong(tmp_path, name):
    kind, settings, row, right, wrong = READY[name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, kept = str(server.getsockname()[1]), tmp_path / "kept"
        kept.touch()
        answers = [answer.replace("PORT", port).replace("KEPT", str(kept)) for answer in (*right, *wrong)]
        scores, lines = score(tmp_path, [{"kind": kind, **settings}], items(*answers, row=row), num_procs=2)
    np.testing.assert_array_equal(scores.total, [1] * len(right) + [0] * len(wrong))
    assert "weight 1: " in lines[0]
    assert kept.exists()


def test_code_that_never_ends_is_wrong_and_not_a_problem(tmp_path):
    reward = {"kind": "code", "seconds": 1}
    scored = items("while True: pass", "import time; time.sleep(1000)", row={"tests": TESTS})
    scores, _ = score(tmp_path, [reward], scored)
    assert (scores.total == 0).all()
    assert scores.problems == {}


@pytest.mark.parametrize(
    ("reward", "row"),
    [("number", {"answer": "seven"}), ("exact", {}), ("code", {"tests": "assert ("}), ("code", {"tests": None})],
)
def test_a_row_that_cannot_be_compared_with_is_a_problem(tmp_path, reward, row):
    with pytest.raises(UsageError, match=r"rows\.jsonl:7"):
        score(tmp_path, [reward], items("7", row=row))


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def test_an_answer_is_held_against_a_schema(tmp_path):
    pytest.importorskip("jsonschema")
    answers = ['{"a": 1}', FENCED.format("json", '{"a": 2}'), '{"a": "1"}', "{}", "a", "[" * 100_000]
    deep, big = "[" * 900 + "]" * 900, ["NaN", "1e400", "1" * 4000, "1" * 5000]
    rewards = [
        {"kind": "json_schema", "name": f"s{number}", "json_schema": schema}
        for number, schema in enumerate((SCHEMA, {"items": {"$ref": "#"}, "multipleOf": 0.1}))
    ]
    scores, _ = score(tmp_path, rewards, items(*answers, deep, *big))
    assert scores.problems == {}
    np.testing.assert_array_equal(scores.values[:, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(scores.values[:, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("schema", [{"type": "no type"}, {"$ref": "#"}, {"$ref": "http://x/y"}, {"pattern": "("}])
def test_a_wrong_schema_and_a_missing_package_are_refused(tmp_path, monkeypatch, schema):
    reward = {"kind": "json_schema", "json_schema": schema}
    with pytest.raises(UsageError, match="schema"):
        score(tmp_path, [reward], items("1"))
    (tmp_path / "jsonschema.py").write_text("raise ImportError")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UsageError, match="install"):
        score(tmp_path, [reward], items("1"))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({}, {"kind": "exact"}),
        ({"kind": "exact", "path": "a.py:b"}, {"path": "a.py:b"}),
        ("exactly", "exact"),
        ("a.py", "a.py:b"),
        ({"kind": "exact", "max_tokens": 3}, {"kind": "length", "max_tokens": 3}),
        ({"path": "a.py:b", "field": "x"}, {"kind": "exact", "field": "x"}),
        ("regex", {"kind": "regex", "pattern": "a"}),
        ({"kind": "regex", "pattern": "("}, {"kind": "regex", "pattern": "()"}),
        ("length", {"kind": "length", "max_tokens": 3}),
        ("json_schema", {"kind": "json_schema", "json_schema": {}}),
        ({"kind": "model"}, {"kind": "model", "path": "runs/judge/final"}),
        ({"kind": "model", "path": "runs/judge/final", "seconds": 3}, {"kind": "exact", "seconds": 3}),
        ({"kind": "length", "min_tokens": 3, "max_tokens": 2}, {"kind": "length", "min_tokens": 3, "max_tokens": 3}),
        ({"kind": "exact", "weight": math.nan}, {"kind": "exact", "weight": 0}),
        ({"kind": "exact", "seconds": 0}, {"kind": "exact", "seconds": 0.5}),
        ({"kind": "exact", "name": "a b"}, {"kind": "exact", "name": "a_b"}),
    ],
)
def test_settings_that_nobody_can_mean_are_refused(wrong, right):
    assert RewardConfig.model_validate(right)
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(wrong)


def test_two_rewards_have_two_names():
    assert [reward.title for reward in configs("a.py:same", "exact", {"path": "b.py:same", "name": "other"})] == [
        "same", "exact", "other",
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="two rewards have the name same"):
        configs("a.py:same", "b.py:same")
