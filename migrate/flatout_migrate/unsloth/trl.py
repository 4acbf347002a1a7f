"""TRL's trainers by its names: SFT, DPO, CPO with SimPO, ORPO, KTO, reward models and GRPO."""

from __future__ import annotations

from typing import Any

from flatout_migrate.translation import rules_of
from flatout_migrate.unsloth.grpo import GRPOConfig as GRPOConfig
from flatout_migrate.unsloth.grpo import GRPOTrainer as GRPOTrainer
from flatout_migrate.unsloth.trainer import SFTConfig, SFTTrainer, config_of

DPOConfig, CPOConfig, ORPOConfig, KTOConfig, RewardConfig = map(config_of, ("DPO", "CPO", "ORPO", "KTO", "Reward"))
RewardConfig.table = {**RewardConfig.table, **rules_of("unsloth/of scores")}


class CPOTrainer(SFTTrainer):
    """TRL's CPOTrainer: `train()` is `flatout.train` on pairs of answers; `loss_type="simpo"` is SimPO.

    Raises ProblemsError that names every argument that flatout cannot honour.
    """

    config: type[SFTConfig] = CPOConfig


class ORPOTrainer(CPOTrainer):
    """TRL's ORPOTrainer."""

    config = ORPOConfig


class DPOTrainer(CPOTrainer):
    """TRL's DPOTrainer. `ref_model` is None: the model at step 0."""

    config: type[SFTConfig] = DPOConfig

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, *more: Any, **given: Any) -> None:
        super().__init__(model, args, *more, ref_model=ref_model, **given)


class KTOTrainer(DPOTrainer):
    """TRL's KTOTrainer, on answers with labels."""

    config = KTOConfig


class RewardTrainer(CPOTrainer):
    """TRL's RewardTrainer: a model that scores answers. A model in memory may have a `score` already."""

    config = RewardConfig

    def _settings(self) -> dict[str, Any]:
        settings, rows = super()._settings(), self._datasets["train"]
        names = rows[0] if isinstance(rows, list) and rows else getattr(rows, "column_names", None)
        # TRL's loss has the margins of rows that have some
        margin = {"margin": True} if "margin" in (names or ()) else {}
        return settings | {"objective": settings["objective"] | margin}


def PatchDPOTrainer(*_: Any) -> None:  # noqa: N802  (the original's name)
    """Do nothing: the trainer here needs no patch."""


PatchFastRL = PatchDPOTrainer
