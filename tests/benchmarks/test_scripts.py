"""Every script can be imported, and what several of them share takes real steps."""

import importlib
import time
from pathlib import Path

import pytest
from bench.shapes import shape_config
from whole_steps import prepare, take_steps

SCRIPTS = sorted(path.stem for path in Path(__file__).parents[2].joinpath("benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name):
    importlib.import_module(name)


def test_steps_of_a_random_model_are_taken_and_summed_up(tmp_path):
    launched_s, heard = time.time(), []
    prepare(tmp_path, shape_config("tiny"), num_steps=4)
    taken = take_steps(
        tmp_path,
        ["model.init=random", "device=cpu"],
        4,
        before=lambda run: heard.append(run.progress.step),
        after=lambda run, recorder: heard.append(len(recorder.steps)),
    )
    found = taken.summary(launched_s)
    assert heard == [0, 4]
    assert len(found["losses"]) == 4
    assert found["losses"][0] == pytest.approx(6.93, abs=0.1)
    assert len(found["micro_batches"]) == 1
    assert found["tokens_per_s"] > 0
    assert 0 < found["launch_to_first_step_s"] < time.time() - launched_s
