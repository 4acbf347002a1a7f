"""Folders of runs as tests of resuming need them: as they were after a step, and their states to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file


def as_after(run_dir: Path, step: int, copy: Path | None = None) -> Path:
    """The folder, or a copy of it, without its results and the checkpoints after `step`."""
    if copy is not None:
        run_dir = Path(shutil.copytree(run_dir, copy, symlinks=True, ignore=shutil.ignore_patterns(".lock")))
    for name in ("final", "best"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return run_dir


def state_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer states of a checkpoint."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def require_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless the tensors have the same names and bits."""
    assert one.keys() == other.keys()
    assert not [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
