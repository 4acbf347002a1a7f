"""TRL's GRPOTrainer: `train()` is `flatout.train` with rounds of rollouts, and rewards copied from the script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flatout import UsageError
from flatout_migrate.copied import Copied
from flatout_migrate.grpo import COPIED, name_copied
from flatout_migrate.script import Script, python_of
from flatout_migrate.translation import RefusedError
from flatout_migrate.unsloth.trainer import SFTTrainer, config_of, listed

GRPOConfig = config_of("GRPO", num_rows=1)


class GRPOTrainer(SFTTrainer):
    """TRL's GRPOTrainer, with rewards that have a name at the top of the script, or in a module, and reward models.

    Raises ProblemsError that names every argument that flatout cannot honour, UsageError for another reward.
    """

    config = GRPOConfig

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, *more: Any, **given: Any,
    ) -> None:  # fmt: skip
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self._copied: Copied | None = None
        names, self._evaluates = [self._reward(function) for function in functions], eval_dataset is not None
        super().__init__(model, args, None, listed(train_dataset), None, *more, reward_funcs=names, **given)

    def _reward(self, function: Any) -> str | dict[str, str]:
        """Return FILE.py:NAME of a reward, or the model that it is; a function of the script itself is copied."""
        if isinstance(function, str):
            return {"model": function}
        if isinstance(function, PreTrainedModel):
            if function.config.num_labels != 1:
                raise UsageError(
                    f"reward_funcs: the model has {function.config.num_labels} scores; load it with num_labels=1"
                )
            return {"model": function.config.name_or_path}
        space = getattr(function, "__globals__", vars(sys.modules["__main__"]))
        name = next((name for name, value in space.items() if value is function), "")
        if not name:
            raise UsageError(f"reward_funcs: {function!r:.60} has no name at the top of the script; write def there")
        if space["__name__"] != "__main__":
            return f"{space['__file__']}:{name}"
        try:
            if self._copied is None:
                # a notebook has no file, but a list of its cells
                own = space.get("__file__"), None if "__file__" in space else python_of(space.get("In", ()))
                self._copied = Copied(Script(Path(own[0] or "notebook"), own[1]))
            self._copied.keep(name)
        except RefusedError as why:
            raise UsageError(f"reward_funcs: {why}") from None
        return f"{COPIED}{name}"

    @property
    def train_dataset(self) -> Any:
        """The prompts, as they were given."""
        return self._datasets["train"]

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train, or go on with the run in `output_dir`; return transformers' TrainOutput. Raises as flatout.train."""
        if self._copied is not None:
            file = self._rewards_file(self._settings()["run_dir"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._copied.text())
        return super().train(resume_from_checkpoint)

    @staticmethod
    def _rewards_file(run_dir: str) -> Path:
        return Path(run_dir) / "data" / "rewards.py"

    def _given_and_defaults(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self._given |= {"num_rows": len(self.train_dataset), "eval_dataset": self._evaluates}
        return super()._given_and_defaults()

    def _settings(self) -> dict[str, Any]:
        settings, row = super()._settings(), self.train_dataset[0]
        rewards = name_copied(settings, self._rewards_file(settings["run_dir"]))
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):  # a text is continued as it is
            settings["data"].setdefault("template", "plain")
            if model := next((each for each in rewards if each.get("kind") == "model"), None):
                why = "it would score a text without a chat template there, and in one here; make prompts chats"
                raise UsageError(f"reward_funcs: {model['path']}: {why}")
        return settings
