"""A run that answers beside the model that it was trained from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.config.folders import is_run_folder
from flatout.config.read import load_config
from flatout.models.load.inference import load_for_inference, load_trained, resolve_model_paths
from flatout.models.lora.layer import without_adapter
from flatout.rollout.chat import Sampling, answer
from flatout.trainer.resume import load_stopped


@dataclass
class RunAndBase:
    """A run's model and its base, loaded to answer.

    `model`, `tokenizer`: those of the run, or of a model folder
    `base`: the same model, which answers without its adapter; another; or None for a model that no run has trained
    `note`: what a reader of its answers should know; "" if that is nothing
    """

    model: Any
    tokenizer: Any
    base: Any
    note: str = ""

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> RunAndBase:
        """Load a run in any state, or a folder of a model or adapter. Raises CheckpointError, UsageError."""
        is_run, note = is_run_folder(folder), ""
        if is_run and not (folder / "final").is_dir():
            model, tokenizer, step = load_stopped(folder, device)
            note = f"this run is not finished: it answers as it was after step {step:,}"
            is_adapted = load_config(folder / "config.yaml").method == "lora"
        else:
            paths = resolve_model_paths(str(folder))
            model, tokenizer = load_trained(paths, device=device)
            is_adapted = paths.adapter is not None
        if is_adapted:
            return cls(model, tokenizer, model, note)
        began = load_config(folder / "config.yaml").model if is_run else None
        if began is None or began.init == "random":
            return cls(model, tokenizer, None, note)
        base = load_for_inference(began.name, revision=began.revision, device=device)
        return cls(model, tokenizer, base, note)

    def answer(
        self, messages: Sequence[Mapping[str, str]], *, by_base: bool, max_new_tokens: int, temperature: float | None
    ) -> str:
        """Return the answer to a conversation, and print it while it is generated."""
        model = self.base if by_base else self.model
        adapted = without_adapter(model) if by_base and self.base is self.model else nullcontext()
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": Sampling(temperature), "stream": True}
        with adapted:
            return answer(model, self.tokenizer, list(messages), **options)
