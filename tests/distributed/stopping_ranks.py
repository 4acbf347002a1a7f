"""One rank of a run, `stopping_ranks.py CONFIG`: rank 1 gets SIGTERM in its second pass of an evaluation."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from flatout.config.read import load_config
from flatout.errors import FlatoutError
from flatout.models.model_with_loss import ModelWithLoss
from flatout.trainer.run import train

passes: list[nn.Module] = []


def before(module: nn.Module, inputs: object) -> None:
    if isinstance(module, ModelWithLoss) and not torch.is_grad_enabled():
        passes.append(module)
        if len(passes) == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    nn.modules.module.register_module_forward_pre_hook(before)
    try:
        train(load_config(Path(sys.argv[1]), []))
    except FlatoutError as error:
        print(f"passes {len(passes)}: {error}", flush=True)
        sys.exit(error.exit_code)
