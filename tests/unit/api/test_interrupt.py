"""What ends a script that trains: one sentence and the command line's exit code; a script may catch it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import signal, sys, time
from pathlib import Path
import flatout

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Wait(flatout.Callback):
    def on_stage(self, name, text):
        self.wait(name)
    def on_step(self, record):
        self.wait("step")
    def wait(self, place):
        if place == {place!r}:
            Path("there").touch()
            while not Path("signalled").exists():
                time.sleep(0.01)

def train():
    return flatout.train(
        model={model!r}, data={data!r}, device="cpu", gpus={gpus}, samples_per_step=6, max_steps={steps},
        max_tokens=500, eval={{"prompts": []}}, callbacks=[Wait()], run_dir="run",
    )
"""
ENDS = "train()"
CATCHES = """
try:
    train()
except KeyboardInterrupt as error:
    print("caught", error, isinstance(error, flatout.FlatoutError))
    caught = error
print("then", len(train().metrics()))
raise caught
"""
SAVED = "stop requested: saved at step 1; run the same command to resume"
UNSAVED = "interrupted without a save; the same call goes on from the last checkpoint, or begins anew if there is none"


def signalled(
    tiny: Any, folder: Path, body: str, *words: str, place: str = "step", number: int = signal.SIGINT, gpus: Any = None
) -> tuple[int, list[str], str]:
    """Run a script, send it a signal when it is at this place, and return its exit code, last lines and all it said."""
    # ranks of their own do not wait for a callback of this process
    names = {"place": place, "model": str(tiny.model_dir), "data": str(tiny.chats), "gpus": gpus}
    names["steps"] = 4 if gpus is None else 10_000
    (folder / "own.py").write_text(SCRIPT.format(**names) + body)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *words, "own.py"], cwd=folder, stdout=log, stderr=log)
        try:
            while not (folder / "there").exists() and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(number)
            (folder / "signalled").touch()
            code = process.wait(240)
        finally:
            process.kill()
    said = (folder / "log").read_text()
    return code, said.splitlines()[-2:], said


@pytest.mark.parametrize(
    ("place", "number", "gpus", "code", "sentence"),
    [
        pytest.param("step", signal.SIGINT, None, 75, SAVED, marks=pytest.mark.exhaustive),
        ("plan", signal.SIGINT, None, 130, UNSAVED),
        pytest.param("step", signal.SIGINT, [0, 1], 75, "stop requested: saved at step", marks=pytest.mark.exhaustive),
    ],
)
def test_a_script_ends_with_one_sentence(place, number, gpus, code, sentence, tiny, tmp_path):
    ended, last, said = signalled(tiny, tmp_path, ENDS, place=place, number=number, gpus=gpus)
    assert "Traceback" not in said
    assert ended == code
    assert last[-1].startswith(sentence)


def test_a_script_that_catches_it_goes_on_and_ends_with_it_where_it_is_raised_again(tiny, tmp_path):
    code, last, said = signalled(tiny, tmp_path, CATCHES)
    assert code == 75, said
    assert f"caught {SAVED} True" in said
    assert last[-2] == "then 4"
    assert last[-1].startswith(SAVED)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("flatout.train('m', data=[{'user': 'a', 'assistant': 'b'}], device='cpu')", 3, "own.py:3: row 1 of your data"),
        ("len(flatout)", 1, "TypeError: object of type 'module' has no len()"),
    ],
)
def test_a_script_ends_with_its_line_and_a_sentence_and_a_fault_of_its_own_with_a_traceback(
    tiny, tmp_path, body, code, last
):
    (tmp_path / "own.py").write_text(f"import flatout\n\n{body.replace(repr('m'), f'model={str(tiny.model_dir)!r}')}\n")
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, code == 1), done.stderr
    assert last in done.stderr.splitlines()[-1]
