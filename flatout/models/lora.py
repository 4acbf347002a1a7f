"""Low-rank adapters: frozen linear layers swapped, instance by instance, for the same layer plus two small matrices."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import UsageError
from flatout.models.bases import FROZEN_LINEARS, FrozenLinear, num_weights
from flatout.models.blocks import replace_module

if TYPE_CHECKING:
    from flatout.models.joined import JoinedLora


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What `add_lora` swapped: `counts` by the last part of the module name, and `report` lines for the console."""

    counts: Mapping[str, int]
    num_trainable: int
    report: tuple[str, ...]


class LoraLinear(nn.Module):
    """y = base(x) + scaling * B A dropout(x), the base frozen (Hu et al. 2021, arXiv:2106.09685).

    `lora_a` (r, in) and `lora_b` (out, r) are fp32 masters (fp64 over an fp64 base), cast to x's dtype for the
    products; `lora_b` starts at 0, so the layer starts equal to its base. With DoRA (arXiv:2402.09353) each row of
    W + scaling * B A is rescaled to the learned length `magnitude` (out,).
    """

    def __init__(
        self,
        base: FrozenLinear,
        *,
        rank: int,
        scaling: float,
        dropout: float,
        dora: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.scaling, self.dropout = rank, scaling, dropout
        self._joined: tuple[JoinedLora, int] | None = None
        # a quantised layer's `weight` is made anew at each access
        self.compute_dtype = base.weight.dtype if isinstance(base, nn.Linear) else base.dtype
        device = next(base.parameters()).device
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        # uniform(-1/sqrt(in), 1/sqrt(in)) as PEFT draws it, on the CPU so that every device starts alike
        bound = 1 / math.sqrt(base.in_features)
        first = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(first.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=device))
        self.magnitude: nn.Parameter | None = nn.Parameter(self._row_lengths()) if dora else None

    @property
    def weight(self) -> torch.Tensor:
        """The frozen base weight (out, in): some models read a linear layer's weight for its dtype or device."""
        return self.base.weight

    def join(self, joined: JoinedLora, index: int) -> None:
        """From now on member `index` of `joined` computes this layer."""
        # the first member holds the module; the others only refer to it, so that it is counted once
        if index == 0:
            self.joined = joined
        self._joined = (joined, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._joined is not None:
            joined, index = self._joined
            return joined.output(index, x)
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        narrow = F.linear(dropped, self.lora_a.to(x.dtype)) * self.scaling
        low = F.linear(narrow, self.lora_b.to(x.dtype))
        output: torch.Tensor = self.base(x)
        if self.magnitude is None:
            return output + low
        ratio = (self.magnitude / self._row_lengths()).to(x.dtype)
        if dropped is x:
            base_output = output if self.base.bias is None else output - self.base.bias
        else:
            base_output = F.linear(dropped, self.base.weight)
        return output + (ratio - 1) * base_output + ratio * low

    @torch.no_grad()
    def _row_lengths(self) -> torch.Tensor:
        """L2 norm of each row of W + scaling * B A, (out,); a constant in the gradient (DoRA, section 4.3)."""
        lengths: torch.Tensor = self._sum().norm(dim=1)
        return lengths

    def _sum(self) -> torch.Tensor:
        product: torch.Tensor = self.lora_b @ self.lora_a
        total: torch.Tensor = self.base.weight.to(self.lora_a.dtype) + self.scaling * product
        return total

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """The one weight (out, in) equal to base and adapter, summed in the masters' dtype, cast to the base's."""
        total = self._sum()
        if self.magnitude is not None:
            total = total * (self.magnitude / total.norm(dim=1))[:, None]
        return total.to(self.base.weight.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling:g}, dropout={self.dropout:g}"


def add_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> SwapReport:
    """Freeze the model and swap the targeted linear layers for LoraLinear.

    Targets: `all-linear` is every nn.Linear but the output head; a list matches whole names or their last parts; one
    string is a regex over full names. The start depends on `seed` and the module's name only, not on the global random
    state or the order of modules. Raises UsageError, naming near misses, when a target matches nothing.
    """
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise UsageError("this model already has LoRA layers; merge or reload it first")
    targets = _targets(model, config.targets)
    model.requires_grad_(False)
    scaling = lora_scaling(config)
    for name, linear in targets.items():
        generator = torch.Generator().manual_seed(_module_seed(seed, name))
        layer = LoraLinear(
            linear, rank=config.rank, scaling=scaling, dropout=config.dropout, dora=config.dora, generator=generator
        )
        replace_module(model, name, layer.train(linear.training))
    counts = Counter(name.rpartition(".")[2] for name in targets)
    return _swap_report(model, config, counts)


def lora_scaling(config: LoraConfig) -> float:
    """The factor of B A x: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """All LoraLinear of a model by full module name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter, for those that are trained; a tied one appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """Freeze every parameter whose full name a regex finds anywhere in it; returns a line for the console.

    Raises UsageError when a pattern matches nothing, or when nothing is left to train.
    """
    counts = []
    for pattern in patterns:
        matched = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
        if not matched:
            example = next((name for name, _ in model.named_parameters()), "none")
            raise UsageError(f"freeze: {pattern!r} matches no parameter; names look like {example}")
        for parameter in matched:
            parameter.requires_grad_(False)
        counts.append(f"{len(matched)} by {pattern!r}")
    num_trainable = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    if not num_trainable:
        raise UsageError(f"freeze: {', '.join(patterns)} freeze every parameter; nothing is left to train")
    return f"frozen parameters: {', '.join(counts)}; {num_trainable:,} values stay trained"


def _module_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _targets(model: PreTrainedModel, wanted: str | list[str]) -> dict[str, FrozenLinear]:
    head = model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, FROZEN_LINEARS)}
    if wanted == "all-linear":
        chosen = {name: module for name, module in linears.items() if module is not head}
        if not chosen:
            raise UsageError(f"lora.targets: model type {model.config.model_type} has no linear layer besides its head")
        return chosen
    matched: set[str] = set()
    for target in [wanted] if isinstance(wanted, str) else wanted:
        found = set(_matches(linears, target, regex=isinstance(wanted, str)))
        if not found:
            raise UsageError(_no_match(target, linears))
        matched |= found
    chosen = {name: module for name, module in linears.items() if name in matched}
    embedding = model.get_input_embeddings()
    if any(module is head and module.weight is embedding.weight for module in chosen.values()):
        raise UsageError("lora.targets: the output head is tied to the embeddings, so it cannot get its own adapter")
    return chosen


def _matches(linears: Mapping[str, nn.Module], target: str, *, regex: bool) -> Iterator[str]:
    for name in linears:
        if re.fullmatch(target, name) if regex else name == target or name.endswith("." + target):
            yield name


def _no_match(target: str, linears: Mapping[str, nn.Module]) -> str:
    leaves = sorted({name.rpartition(".")[2] for name in linears})
    near = difflib.get_close_matches(target, leaves, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(leaves)}"
    return f"lora.targets: {target!r} matches no linear layer of this model; {hint}"


def _swap_report(model: PreTrainedModel, config: LoraConfig, counts: Counter[str]) -> SwapReport:
    num_trainable = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    share = num_trainable / num_weights(model)
    kind = "DoRA" if config.dora else "LoRA"
    lines = [
        f"{kind} rank {config.rank}, alpha {config.alpha:g}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
        + f"; {num_trainable:,} trained parameters ({share:.2%})"
    ]
    # transformers keeps all experts of a layer in one 3-D parameter, which is no linear layer
    num_experts = sum(parameter.dim() == 3 for parameter in model.parameters())
    if num_experts:
        lines.append(
            f"{num_experts} fused expert tensors stay frozen without an adapter: LoRA reaches linear layers only"
        )
    return SwapReport(counts=dict(counts), num_trainable=num_trainable, report=tuple(lines))
