"""No traceback for anything that a user or a machine can do: thousands of spoiled inputs, through the command line.

The run's summary has the number of cases and of each kind of fault. FLATOUT_FUZZ_SEEDS=N draws N samples instead of
one, FLATOUT_FUZZ_SEEDS=all takes every case (hours).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import fuzz_commands
import fuzz_config
import fuzz_folders
import fuzz_models
import fuzz_rows
import fuzz_templates
import pytest
from fuzz_judge import Case, Outcome, fault, kind_of
from fuzz_runner import failures
from fuzz_world import World

from tests.usual import usual

SEEDS = os.environ.get("FLATOUT_FUZZ_SEEDS", "1")
# kind -> its cases, and how many of those that are drawn a sample has
KINDS = {
    "config": (fuzz_config.cases, 250),
    "config file": (fuzz_config.file_cases, 0),
    "model": (fuzz_models.model_cases, 18),
    "adapter": (fuzz_models.adapter_cases, 5),
    "tokenizer": (fuzz_models.tokenizer_cases, 8),
    "store": (fuzz_folders.store_cases, 70),
    "run": (fuzz_folders.run_cases, 4),
    "rows": (fuzz_rows.cases, 45),
    "templates": (fuzz_templates.cases, 26),
    "disk": (fuzz_commands.disk_cases, 0),
}


@pytest.fixture(scope="session")
def world(tiny, tmp_path_factory):
    return World(tmp_path_factory.mktemp("fuzz"), tiny.model_dir, tiny.chats)


@pytest.mark.timeout(0 if SEEDS != "1" else 600)
@pytest.mark.parametrize("kind", usual(KINDS, ["config file"]))
def test_every_spoiled_input_is_refused_clearly_or_handled(kind, world, record_property):
    list_cases, sample_size = KINDS[kind]
    every_case = list(list_cases(world))
    assert len({case.name for case in every_case}) == len(every_case)
    cases = sample(every_case, sample_size)
    faults = failures(cases)
    record_property("fuzz", {"cases": len(cases), **Counter(map(kind_of, faults.values()))})
    told = [f"{kind}: {name}\n    {why}" for name, why in faults.items()]
    assert not told, f"{len(told)} faults:\n" + "\n".join(told[:40])


def sample(cases: Sequence[Case], size: int) -> Sequence[Case]:
    """All that are not drawn, and those of every seed, in order."""
    drawn = [index for index, case in enumerate(cases) if case.drawn]
    seeds = [] if SEEDS == "all" else range(int(SEEDS))
    taken = {index for seed in seeds for index in random.Random(seed).sample(drawn, min(size, len(drawn)))}
    return [case for index, case in enumerate(cases) if not case.drawn or index in taken or SEEDS == "all"]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(2, err="error: run.yaml: lora.rank: input should be at least 1, got 0\n"), None),
        (Outcome(0), "accepted"),
        (Outcome(1, err="error: run.yaml: no\n"), "exit code 1"),
        (Outcome(None, raised="KeyError: 'x' in data/rows:f"), "escaped"),
        (Outcome(2, err="Traceback (most recent call last):\nerror: run.yaml\n"), "traceback"),
        (Outcome(2), "no message"),
        (Outcome(2, err="error: it is wrong\n"), "names none of run.yaml"),
        (Outcome(2, err="error: run.yaml: a\nerror: run.yaml: b\n"), "not exactly one"),
        (Outcome(2, err="error: run.yaml: 'NoneType' object is not subscriptable\n"), "raw text"),
        (Outcome(2, err="error: run.yaml: found \x1b[31m\n"), "control character"),
        (Outcome(2, err=f"error: run.yaml: found {'x' * 5000}\n"), "a line of"),
        (Outcome(2, err="error: run.yaml: wrong\n", complaint="model was changed"), "model was changed"),
    ],
)
def test_the_judge_tells_good_ends_from_bad_ones(outcome, expected):
    case = Case("a case", ("plan", "run.yaml"), lambda here: None, "refuse", ("run.yaml",))
    found = fault(case, outcome)
    assert found is None if expected is None else found is not None and expected in found


@pytest.mark.exhaustive
def test_the_runner_survives_hangs_deaths_and_tracebacks(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz_runner.HANG_S", 2)

    def python(name: str, text: str, disk_bytes: int | None = None) -> Case:
        def make(here: Path) -> None:
            (here / "run.py").write_text(f"import flatout\nconfig = None\n{text}")

        return Case(name, ("plan", "run.py"), make, "refuse", disk_bytes=disk_bytes)

    found = failures([
        python("hangs", "import time\ntime.sleep(60)"),
        python("dies", "import os\nos._exit(3)"),
        python("raises", "raise KeyboardInterrupt"),
        Case("is right", ("plan", "absent.yaml"), lambda here: None, "refuse", ("absent.yaml",)),
    ])  # fmt: skip
    assert "nothing for 2 s" in found["hangs"]
    assert "code 3" in found["dies"]
    assert found["raises"].startswith("exit code 130")
    assert "is right" not in found or "raw text" in found["is right"]
