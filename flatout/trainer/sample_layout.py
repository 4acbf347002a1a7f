"""Decide how samples share a micro-batch: as rows or packed, with common prefixes once or for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.schema import Config
from flatout.data.token_store import TokenStore
from flatout.errors import UsageError
from flatout.models.arch_quirks import LayoutChoice, choose_layout, sharing_problem
from flatout.models.objective import CROSS_ENTROPY, Objective
from flatout.planner.devices import Device
from flatout.planner.host_bound import is_host_bound, reachable_flops_per_s
from flatout.planner.layout import ParallelLayout
from flatout.planner.shape import ModelShape
from flatout.planner.steps.prefixes import MIN_PREFIX_TOKENS, PrefixIndex, find_prefixes
from flatout.planner.steps.run_plan import RunPlan
from flatout.track.callback import Reporter

# batch.share_prefix: auto shares from this share of all tokens on, as attention then takes two passes for each layer
MIN_SHARED_SHARE = 0.05


def takes_rows(config: Config, text_config: Any, reporter: Reporter, unpackable: str | None) -> bool:
    """Choose the layout and report it; return whether each sample is a row. Raises UsageError as `choose_layout`."""
    choice = LayoutChoice("rows", unpackable) if unpackable else choose_layout(text_config, config.batch.layout)
    if choice.layout == "rows" and config.experts.parallel > 1:
        raise UsageError(
            f"experts.parallel: {config.experts.parallel} needs packed samples, but this model takes rows "
            f"({choice.reason}); set experts.parallel: 1"
        )
    reporter.stage("layout", f"{choice.layout}: {choice.reason}")
    return choice.layout == "rows"


def index_prefixes(
    config: Config,
    text_config: Any,
    store: TokenStore,
    train_ids: NDArray[np.int64] | None,
    objective: Objective,
    *,
    rows: bool,
    inexact: str | None,
) -> tuple[PrefixIndex | None, str]:
    """Return where samples share prefixes; None, and why, if they do not or must not.

    `rows` is the layout, `inexact` what an earlier self-test found. Raises UsageError if batch.share_prefix: on cannot
    be exact.
    """
    wanted = config.batch.share_prefix
    if wanted == "off":
        return None, "not shared: as configured"
    lengths = store.lengths if train_ids is None else store.lengths[train_ids]
    problem = inexact or ("each sample is a row of its own" if rows else None)
    if objective is not CROSS_ENTROPY:
        problem = problem or f"objective {objective.name} may read whole samples"
    if config.lora.dropout:
        problem = problem or "lora.dropout draws another mask for each row"
    problem = problem or sharing_problem(text_config, int(lengths.max()))
    if problem:
        if wanted == "on":
            raise UsageError(f"batch.share_prefix: on does not work here: {problem}; set batch.share_prefix: auto")
        return None, f"not shared: {problem}"
    index = find_prefixes(store.token_ids, store.loss_mask, store.offsets, train_ids)
    if not len(index.shared):
        return None, f"not shared: no samples begin with the same {MIN_PREFIX_TOKENS} unlabelled tokens"
    return index, ""


def sharing_pays(
    config: Config, plan: RunPlan, shape: ModelShape, layout: ParallelLayout, device: Device | None
) -> tuple[bool, str]:
    """Decide whether the steps of a plan that shares prefixes pay off, and say why."""
    share, is_auto = plan.shared_share, config.batch.share_prefix == "auto"
    if not share:
        return False, "not shared: no samples of one micro-batch begin with the same tokens"
    if is_auto and share < MIN_SHARED_SHARE:
        return False, f"not shared: this would save {share:.1%} of the tokens, less than {MIN_SHARED_SHARE:.0%}"
    # recorded graphs need the number of prefixes before a pass
    records = config.cuda_graphs == "auto" and config.method == "lora" and not layout.lockstep
    device = device if is_auto and records else None
    if device is not None and is_host_bound(plan, shape, reachable_flops_per_s(config, device.name)):
        return False, "not shared: launching kernels takes longest here, which recorded CUDA graphs shorten"
    return True, f"shared: {share:.1%} of the tokens are not computed again"
