"""Routers of experts: their load, and losses on it that are normalized over the whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.config.schema import ExpertsConfig
from flatout.errors import Fix, UsageError
from flatout.models.auxiliary_loss import AuxiliaryLoss, StepFacts
from flatout.models.blocks import replace_module, sample_counts
from flatout.models.experts.block import experts_modules
from flatout.models.experts.lora import plain_name
from flatout.models.packed import PackedBatch

# each router's logits and choices of the last pass
_ROUTED = "flatout_routed"
# what transformers calls a bias of the scores by which experts are chosen, on the router or beside it
_BIASES = ("e_score_correction_bias", "expert_bias")


class Routers(AuxiliaryLoss):
    """The routers of a model's L layers with E experts each, read in every forward pass.

    With N tokens in the step, over all ranks and micro-batches and without padding, p the softmax of a router's logits
    and f_e the share of them that chose expert e (so that all f_e sum to k):

        balance = E sum_e f_e P_e, P_e = 1 / (L N) sum over layers and tokens of p_e   (arXiv:2101.03961, eq. 4 to 6)
        z       = 1 / (L N) sum over layers and tokens of logsumexp(logits)^2          (arXiv:2202.08906, eq. 5)

    f and P are means over all layers, as in transformers' `load_balancing_loss_func`, which gives the same for a step
    of one micro-batch. f is a count without gradient, and has to be known before the first backward pass: a step of
    several micro-batches counts it in a forward pass of its own.

    `buffers` are the biases that `after_update` moves; empty unless `experts.bias_update` is set.
    """

    def __init__(self, model: PreTrainedModel, config: ExpertsConfig) -> None:
        super().__init__()
        text = model.config.get_text_config()
        model_factor = float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
        asked = config.balance_loss == "model" or getattr(text, "output_router_logits", False)
        configured = None if config.balance_loss == "model" else config.balance_loss
        self.balance_loss = configured if configured is not None else model_factor if asked else 0.0
        # what TRL would add
        self._unused = model_factor if config.balance_loss is None and not asked else 0.0
        self.z_loss = config.z_loss
        self.layers = find_routers(model)
        sizes: set[Any] = {module.num_experts for module in experts_modules(model).values()}
        if len(sizes) != 1 or len(self.layers) != len(experts_modules(model)):
            self.layers = []
        self.num_experts = int(max(sizes, default=0))
        if not self.layers and (self.balance_loss or self.z_loss):
            setting = "experts.balance_loss" if self.balance_loss else "experts.z_loss"
            what = f"the routers of model type {text.model_type} are not known"
            raise UsageError(f"{setting}: {what}", [Fix({setting: 0})])
        self.bias_update = config.bias_update
        places = _bias_places(model) if self.layers and self.bias_update else {}
        if self.bias_update and not places:
            what = f"model type {text.model_type} has no router with a correction bias, or one that is not known"
            raise UsageError(f"experts.bias_update: {what}", [Fix({"experts.bias_update": 0})])
        self._model, self._biased = model, list(places.values())
        self.buffers = {path: model.get_buffer(path) for path in places}
        for router in self.layers:
            router.register_forward_hook(self._record)
        self._counts = self._values = torch.zeros(0)
        self._shares: Tensor | None = None

    @property
    def line(self) -> str:
        losses = {"balance": self.balance_loss, "z": self.z_loss}
        used = [f"{name} loss times {factor:g}" for name, factor in losses.items() if factor]
        used += [f"{len(self.buffers)} biases updated by {self.bias_update:g}"] if self.buffers else []
        line = f"{len(self.layers)} routers of {self.num_experts} experts: {', '.join(used) or 'no loss on the load'}"
        unused = f"; experts.balance_loss: model adds its config's {self._unused:g} times, as TRL does"
        return line + unused if self._unused else line

    def start_step(self, step: StepFacts) -> None:
        """Begin a step's counts; a repeated step keeps its shares of load."""
        if self._step is None or self._step.index != step.index:
            self._shares = None
        self._step = step
        self._counts = torch.zeros(len(self.layers), self.num_experts, dtype=torch.float64, device=step.device)
        self._values = torch.zeros(2, dtype=torch.float64, device=step.device)

    def needs_passes(self, num_micro_batches: int) -> bool:
        """Whether gradients need the step's choices, which one micro-batch knows by itself and a repeated step has."""
        return num_micro_batches > 1 and bool(self.balance_loss) and self._shares is None

    def forget_step(self) -> None:
        self._step = self._shares = None

    def end_passes(self) -> None:
        self._set_shares()
        self._counts = torch.zeros_like(self._counts)

    def _set_shares(self) -> None:
        if self._shares is None:
            assert self._step is not None
            self._shares = self._step.sum_values(self._counts.sum(0)) / (len(self.layers) * self._step.num_tokens)

    def observe(self, model: PreTrainedModel, batch: PackedBatch) -> None:
        self._count(sample_counts(model, batch))

    def _count(self, times: Tensor) -> None:
        """Count the last pass's choices of tokens, each as often as samples have it, (T,)."""
        chosen = torch.stack([getattr(router, _ROUTED)[1] for router in self.layers])
        counted = times.to(torch.float64)[:, None].expand(-1, chosen.shape[-1]).flatten()
        # sums of integers are exact in any order
        self._counts.scatter_add_(1, chosen.flatten(1).long(), counted.expand(len(chosen), -1))

    def add(self, loss_sum: Tensor, model: PreTrainedModel, batch: PackedBatch) -> Tensor:
        """Count a micro-batch's choices, and add the gradients of both losses to its loss, whose value stays."""
        if self._step is None or not self._step.num_tokens:
            return loss_sum
        times = sample_counts(model, batch)
        self._count(times)
        if self.balance_loss:
            self._set_shares()
        if not (self.balance_loss or self.z_loss):
            return loss_sum
        wide = torch.promote_types(loss_sum.dtype, torch.float32)
        weights = times.to(wide)
        balance = squares = torch.zeros((), dtype=wide, device=loss_sum.device)
        for router in self.layers:
            logits = getattr(router, _ROUTED)[0].to(wide)
            if self._shares is not None:
                balance = balance + (weights @ logits.softmax(-1)) @ self._shares.to(wide)
            if self.z_loss:
                squares = squares + (weights * logits.logsumexp(-1).square()).sum()
        rows = len(self.layers) * self._step.num_tokens
        values = torch.stack([balance * (self.num_experts / rows), squares / rows])
        self._values += values.detach()
        extra = self._step.normalizer * (self.balance_loss * values[0] + self.z_loss * values[1])
        return loss_sum + (extra - extra.detach())

    def graph_outputs(self) -> list[Tensor]:
        """Return the last pass's choices (L, T, k) and, for losses, logits (L, T, E)."""
        logits, chosen = zip(*(getattr(router, _ROUTED) for router in self.layers), strict=True)
        return [torch.stack(by_layer) for by_layer in (chosen, logits) if by_layer[0] is not None]

    def load_graph_outputs(self, outputs: Sequence[Tensor]) -> None:
        chosen, *more = outputs
        logits = more[0].unbind() if more else [None] * len(chosen)
        for router, routed in zip(self.layers, zip(logits, chosen, strict=True), strict=True):
            setattr(router, _ROUTED, routed)

    def end_pass(self) -> None:
        for router in self.layers:
            setattr(router, _ROUTED, None)

    @property
    def sums(self) -> Tensor:
        """This rank's part of the step: both losses and all counts, fp64 (2 + L E,), to be summed over ranks."""
        return torch.cat([self._values, self._counts.flatten()])

    def loads(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return, of the sums over ranks, each expert's load / mean of its layer (L, E), and each layer's entropy (L,).

        The entropy is that of the layer's shares of load, relative to that of equal shares, log E.
        """
        counts = sums[2:].view(len(self.layers), -1)
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        entropy = torch.special.entr(shares).sum(1) / math.log(max(2, self.num_experts))
        return shares * self.num_experts, entropy

    def report(self, sums: Tensor, *, with_maps: bool) -> dict[str, Any]:
        """Return the losses without their factors, and figures of load by layer; all loads if `with_maps`."""
        balance, squares = sums[:2].tolist()
        loads, entropy = self.loads(sums)
        return {
            "balance_loss": balance if self.balance_loss else None,
            "z_loss": squares if self.z_loss else None,
            "expert_peak_load": tuple(round(load, 4) for load in loads.amax(1).tolist()),
            "expert_entropy": tuple(round(layer_entropy, 5) for layer_entropy in entropy.tolist()),
            "expert_loads": tuple(tuple(round(load, 2) for load in row) for row in loads.tolist()) if with_maps else (),
        }

    def hold_buffers(self) -> None:
        for path, bias in self.buffers.items():
            replace_module(self._model, path, bias)

    @torch.no_grad()
    def after_update(self, sums: Tensor, skip: Tensor | None = None) -> None:
        """Move the biases: b_e += u sign(mean load - load_e) (arXiv:2408.15664, algorithm 1)."""
        if not self.buffers:
            return
        counts = sums[2:].view(len(self.layers), -1)
        # integers, so that equal loads have a sign of 0
        moves = self.bias_update * (counts.sum(1, keepdim=True) - self.num_experts * counts).sign()
        if skip is not None:
            moves = moves.where(~skip.bool(), 0)
        # a list of layers as an index would make the host wait
        for layer, bias in zip(self._biased, self.buffers.values(), strict=True):
            bias += moves[layer].view_as(bias)

    def _record(self, router: nn.Module, __: Any, output: Any) -> None:
        logits, _, chosen, *_ = output
        # an attribute of each module, as a list of all would be another graph in each compiled layer
        setattr(router, _ROUTED, (logits if self.balance_loss or self.z_loss else None, chosen))


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the router beside each layer's experts: in transformers, it returns logits, weights and choices."""
    routers = []
    for path in experts_modules(model):
        block = model.get_submodule(plain_name(path).rpartition(".")[0])
        siblings = [module for module in block.children() if "Router" in type(getattr(module, "base", module)).__name__]
        routers += siblings if len(siblings) == 1 else []
    return routers


def prepare_biases(model: nn.Module) -> None:
    """Make the routers' correction biases buffers of at least fp32: 16 bits would swallow updates.

    Some are frozen parameters, which strategies would shard.
    """
    for path in _bias_places(model):
        module, _, name = path.rpartition(".")
        owner = model.get_submodule(module)
        bias = getattr(owner, name).detach()
        delattr(owner, name)
        owner.register_buffer(name, bias.to(torch.promote_types(bias.dtype, torch.float32)))


def _bias_places(model: nn.Module) -> dict[str, int]:
    places = {}
    for index, path in enumerate(experts_modules(model)):
        name = plain_name(path).rpartition(".")[0]
        block = model.get_submodule(name)
        names = [key for key, _ in (*block.named_parameters(), *block.named_buffers())]
        places.update({f"{name}.{key}": index for key in names if key.rpartition(".")[2] in _BIASES})
    return places
