"""TRL's trainers of preferences, as Unsloth's documents call them: DPO, CPO with SimPO, ORPO, KTO, reward models."""

from __future__ import annotations

from typing import Any, ClassVar

from flatout import UsageError
from flatout_migrate import translation as t
from flatout_migrate.call_arguments import ARGUMENTS
from flatout_migrate.preference import defaults_of, rules_of_method
from flatout_migrate.unsloth.trainer import SFTConfig, SFTTrainer


class DPOConfig(SFTConfig):
    """TRL's arguments of DPOTrainer; one that flatout cannot honour raises ProblemsError here."""

    method: ClassVar[str] = "dpo"
    table = {**ARGUMENTS, **rules_of_method("dpo")}

    def __init__(self, output_dir: str = "trainer_output", **given: Any) -> None:
        self.__dict__["defaults"] = defaults_of(self.method, given)
        super().__init__(output_dir, **given)


class CPOConfig(DPOConfig):
    """TRL's arguments of CPOTrainer, which also trains SimPO."""

    method = "cpo"
    table = {**ARGUMENTS, **rules_of_method("cpo")}


class ORPOConfig(DPOConfig):
    """TRL's arguments of ORPOTrainer."""

    method = "orpo"
    table = {**ARGUMENTS, **rules_of_method("orpo")}


class KTOConfig(DPOConfig):
    """TRL's arguments of KTOTrainer."""

    method = "kto"
    table = {**ARGUMENTS, **rules_of_method("kto")}


class RewardConfig(DPOConfig):
    """TRL's arguments of RewardTrainer."""

    method = "reward"
    table = {
        **ARGUMENTS,
        **rules_of_method("reward"),
        "task_type": t.only(("SEQ_CLS", "CAUSAL_LM"), "adapters of a model that scores: write SEQ_CLS"),
    }


class DPOTrainer(SFTTrainer):
    """TRL's DPOTrainer: `train()` is `flatout.train` on pairs of answers. `ref_model` is None: the model at step 0.

    Raises ProblemsError that names every argument that flatout cannot honour.
    """

    config: type[SFTConfig] = DPOConfig
    too_long = "drop"

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, *more: Any, **given: Any) -> None:
        super().__init__(model, args, *more, ref_model=ref_model, **given)

    def _given_and_defaults(self) -> tuple[dict[str, Any], dict[str, Any]]:
        settings, _ = super()._given_and_defaults()
        if "seed" in settings:  # their notebooks give another to get_peft_model; here one seed does both
            settings.pop("random_state", None)
        defaults = defaults_of(self.config.method, settings)  # type: ignore[attr-defined]
        if "max_seq_length" in settings:
            defaults.pop("max_length")
        return settings, defaults

    def _rows(self, dataset: Any) -> tuple[Any, dict[str, Any]]:
        from datasets import Dataset, IterableDataset

        if dataset is None:
            raise UsageError("train_dataset is missing; pass a datasets.Dataset, rows, or the path of a file")
        if isinstance(dataset, list | IterableDataset):
            dataset = Dataset.from_list([dict(row) for row in dataset])
        return dataset, {}


class CPOTrainer(DPOTrainer):
    """TRL's CPOTrainer, which has no reference; `loss_type="simpo"` is SimPO."""

    config: type[SFTConfig] = CPOConfig

    def __init__(self, model: Any, args: Any = None, *more: Any, **given: Any) -> None:
        SFTTrainer.__init__(self, model, args, *more, **given)


class ORPOTrainer(CPOTrainer):
    """TRL's ORPOTrainer."""

    config = ORPOConfig


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


def PatchDPOTrainer() -> None:  # noqa: N802  (the original's name)
    """Do nothing: the trainer here needs no patch."""
