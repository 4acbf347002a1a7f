"""What start-up proves about a run's model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.data.token_store import TokenStore
from flatout.errors import Fix, UsageError
from flatout.models.gradient_paths import unreached_parameters
from flatout.models.load.model import LoadedModel
from flatout.models.lora.adapter import adapter_config
from flatout.models.picture_check import batch_of, check_pictures, read_with_own_attention
from flatout.models.selftest import prove_layout
from flatout.trainer.picture_inputs import PictureMaker, processor_of, require_trainable
from flatout.trainer.state import Setup


class Proofs:
    """Checks a run's model before it trains; all methods are collective."""

    def __init__(self, setup: Setup) -> None:
        self._config, self._planned, self._reporter = setup.config, setup.planned, setup.reporter
        self._stores = [setup.planned.store, *(eval_set.store for eval_set in setup.planned.eval_sets)]
        self._group = setup.checkpoints.group

    @property
    def _longest(self) -> int:
        return max(int(store.lengths.max()) for store in self._stores)

    def prove_layout(self, loaded: LoadedModel) -> tuple[LoadedModel, str]:
        """Prove the model's layout on all ranks as `models/selftest.py` does; return the model and a line about it."""
        loaded = self._attending(loaded)
        results: list[tuple[LoadedModel, str]] = []
        options: dict[str, Any] = {
            "longest": self._longest,
            "any_attention": self._config.model.attention == "auto",
            "shares_prefixes": self._planned.plan.shares_prefixes,
        }
        # if it fails on one rank, all must plan again
        self._group.run_on_all_ranks(lambda: results.append(prove_layout(loaded, **options)))
        proved, line = results[0]
        self._prove_pictures(proved)
        return proved, line

    @property
    def _pictures(self) -> TokenStore | None:
        """The first set of the run that has pictures."""
        return next((store for store in self._stores if store.num_pictures), None)

    def _attending(self, loaded: LoadedModel) -> LoadedModel:
        """Return the model with the attention that the run's pictures need. Raises UsageError if another is wanted."""
        if self._pictures is None or not read_with_own_attention(loaded.model, loaded.dtype):
            return loaded
        if (named := self._config.model.attention) != "auto":
            raise UsageError(
                f"model.attention: {named} is causal, but {loaded.model.config.model_type} reads pictures both ways",
                [Fix({"model.attention": "auto"})],
            )
        return replace(loaded, attention="transformers")

    def _prove_pictures(self, loaded: LoadedModel) -> None:
        """Prove pictures on all ranks as `models/picture_check.py` does, and report it; not for data without any."""
        if (store := self._pictures) is None:
            return
        require_trainable(self._planned.data.settings, store, self._planned.parallel_layout)
        unreached: list[str] = []

        def check() -> None:
            maker = PictureMaker(processor_of(store), loaded.model)
            unreached.append(check_pictures(loaded, maker.probes(0), maker.probes(1), maker.with_images))
            maker.close()

        self._group.run_on_all_ranks(check)
        self._reporter.stage("self-test", unreached[0])

    def prove_adapter(self, loaded: LoadedModel) -> str | None:
        """Prove that PEFT will read the adapter, now and not after the last step; return a line if there is one to say.

        Raises UsageError as `adapter_config` does.
        """
        spelled = adapter_config(loaded.model, self._config.lora, base_name=self._config.model.name)
        if by_weight := len(spelled["target_parameters"] or ()):
            return f"{by_weight} layers are exported as target_parameters, which PEFT needs for this model"
        return None

    def unreached_parameters(self, loaded: LoadedModel) -> list[str]:
        """Return the names of trained parameters that no gradient reaches, see `models/gradient_paths.py`."""
        unreached: list[str] = []

        def search() -> None:
            # what reads pictures is reached through them
            maker = None if self._pictures is None else PictureMaker(processor_of(self._pictures), loaded.model)
            seen = None if maker is None else batch_of(maker.probes(0), maker.with_images, is_padded=loaded.is_padded)
            unreached.extend(unreached_parameters(loaded, longest=self._longest, seen=seen))
            if maker is not None:
                maker.close()

        self._group.run_on_all_ranks(search)
        return unreached
