"""What start-up proves about a run's model, and what an equal earlier start has proved already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flatout.data.token_store import TokenStore
from flatout.environment import CHECK_AGAIN, checks_again
from flatout.errors import Fix, UsageError
from flatout.io.kept_facts import KeptFacts, find_facts, keep_facts
from flatout.models.gradient_paths import unreached_parameters
from flatout.models.load.model import LoadedModel
from flatout.models.lora.adapter import adapter_config
from flatout.models.picture_check import batch_of, check_pictures, read_with_own_attention
from flatout.models.proof_key import proof_key
from flatout.models.selftest import prove_layout
from flatout.trainer.picture_inputs import PictureMaker, processor_of, require_trainable
from flatout.trainer.state import Setup

# the settings that the checks depend on, as pydantic's `include`
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "method", "device", "deterministic", "freeze", "compile", "recompute", "strategy", "deepspeed", "model",
            "lora", "base", "full", "experts", "sharding", "comm",
        ),
        True,
    ),
    "batch": {"layout", "share_prefix"},
}  # fmt: skip


class Proofs:
    """Keeps what was proved, and finds it again; all methods are collective, and all ranks find the same.

    With `reuse_checks`, a check is left out or shortened if an earlier start proved it with an equal key: the same
    code and packages, weights, model, settings, split over ranks, device and environment. Only a process that runs
    nothing but flatout's own code may recall, as code of others may have changed something that no key holds.
    """

    def __init__(self, setup: Setup) -> None:
        self._config, self._planned, self._reporter = setup.config, setup.planned, setup.reporter
        self._stores = [setup.planned.store, *(eval_set.store for eval_set in setup.planned.eval_sets)]
        self._group, self._device = setup.checkpoints.group, setup.device
        self._key: Mapping[str, Any] | None = None
        self._tell = partial(self._reporter.stage, "checks")
        if setup.reuse_checks and checks_again():
            self._reporter.stage("checks", f"none is reused: {CHECK_AGAIN} is set")
        # without a fingerprint the weights are not known
        reuse_checks = setup.reuse_checks and not checks_again() and "model" in self._planned.fingerprints
        self._reuse_checks = all(self._group.all_gather(reuse_checks))

    def identify(self, loaded: LoadedModel) -> None:
        """Take the loaded model, still without adapters, into the key; call it before the rest."""
        config, planned, layout = self._config, self._planned, self._planned.parallel_layout
        if self._reuse_checks:
            self._key = {
                **proof_key(loaded, self._device),
                "settings": json.dumps(config.model_dump(mode="json", include=SETTINGS)),
                "new_tokens": list(config.data.added_tokens),
                "seed": config.seed if config.model.init == "random" else None,
                "weights": dict(planned.fingerprints["model"]),
                "longest": self._longest,
                "batch": dict(planned.plan.batch_bounds),
                "memory": [planned.memory.recompute, planned.memory.transposed_weights],
                "split": [
                    layout.strategy,
                    self._group.rank.world,
                    layout.num_replicas,
                    layout.expert_ranks,
                    layout.context_ranks,
                ],
            }

    @property
    def _longest(self) -> int:
        return max(int(store.lengths.max()) for store in self._stores)

    def prove_layout(self, loaded: LoadedModel) -> tuple[LoadedModel, str]:
        """Prove the model's layout on all ranks as `models/selftest.py` does; return the model and a line about it."""
        causal, loaded = loaded, self._attending(loaded)
        name = "self-test" if loaded is causal else "self-test in both directions"
        if known := self.find(name):
            self._prove_pictures(loaded)
            return loaded, f"{known.facts['line']}; {known.since}"
        results: list[tuple[LoadedModel, str]] = []
        options: dict[str, Any] = {
            "longest": self._longest,
            "any_attention": self._config.model.attention == "auto",
            "shares_prefixes": self._planned.plan.shares_prefixes,
        }
        # if it fails on one rank, all must plan again
        self._group.run_on_all_ranks(lambda: results.append(prove_layout(loaded, **options)))
        proved, line = results[0]
        # a model that had to change is proved every time
        if proved is loaded:
            self.keep(name, {"line": line})
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
        known = self.find("adapter")
        if known is None:
            spelled = adapter_config(loaded.model, self._config.lora, base_name=self._config.model.name)
            known = KeptFacts({"num_by_weight": len(spelled["target_parameters"] or ())}, "")
            self.keep("adapter", known.facts)
        if by_weight := known.facts["num_by_weight"]:
            return f"{by_weight} layers are exported as target_parameters, which PEFT needs for this model"
        return None

    def unreached_parameters(self, loaded: LoadedModel) -> list[str]:
        """Return the names of trained parameters that no gradient reaches, see `models/gradient_paths.py`."""
        if known := self.find("gradient-paths"):
            return list(known.facts["unreached"])
        unreached: list[str] = []

        def search() -> None:
            # what reads pictures is reached through them
            maker = None if self._pictures is None else PictureMaker(processor_of(self._pictures), loaded.model)
            seen = None if maker is None else batch_of(maker.probes(0), maker.with_images, is_padded=loaded.is_padded)
            unreached.extend(unreached_parameters(loaded, longest=self._longest, seen=seen))
            if maker is not None:
                maker.close()

        self._group.run_on_all_ranks(search)
        self.keep("gradient-paths", {"unreached": unreached})
        return unreached

    def find(self, kind: str) -> KeptFacts | None:
        """Return what was proved; None on all ranks unless all have found it."""
        if not self._reuse_checks:
            return None
        assert self._key is not None
        facts = find_facts(kind, self._key, self._tell)
        return facts if all(self._group.all_gather(facts is not None)) else None

    def keep(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Keep these facts of a passed check for a later start with the same key."""
        if not self._reuse_checks:
            return
        assert self._key is not None
        keep_facts(kind, self._key, facts, self._tell)
