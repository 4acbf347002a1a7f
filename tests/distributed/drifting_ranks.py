"""One rank of a run, `drifting_ranks.py CONFIG`: on rank 1 a bit of a weight flips in memory after the third update."""

import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.cli.main import main

num_updates = 0


def flip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global num_updates  # noqa: PLW0603  (a hook has nothing else to count in)
    num_updates += 1
    if os.environ["RANK"] == "1" and num_updates == 3:
        weight = optimizer.param_groups[0]["params"][0].detach()
        weight.view(-1)[:1].view(torch.int64).bitwise_xor_(1)


if __name__ == "__main__":
    register_optimizer_step_post_hook(flip)
    sys.exit(main(["train", sys.argv[1]]))
