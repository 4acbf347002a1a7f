"""One rank of a run, `slow_callback_ranks.py CONFIG`: a callback takes three times `faults.hang_s` in step 3."""

import os
import sys
import time
from pathlib import Path

from flatout.config.read import load_config
from flatout.io import bounded_wait
from flatout.track.callback import Callback
from flatout.trainer import run

config = load_config(Path(sys.argv[1]), [])


class Slow(Callback):
    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        if (name, done) == ("step", 3):
            time.sleep(3 * config.faults.hang_s)


def refuse(*arguments: object) -> None:
    raise AssertionError("a rank that writes no facts of the run computes them")


if __name__ == "__main__":
    bounded_wait.NOTICE_AFTER_S = 0.5
    if os.environ["RANK"] == "1":
        run.run_start = refuse
    run.train(config, callbacks=[Slow()])
