"""Low-rank adapters: each targeted linear layer is frozen and wrapped with two small trained matrices."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from flatout.config.schema import LoraConfig
from flatout.errors import UsageError
from flatout.models.bases.frozen_linear import FrozenLinear, is_plain_linear, num_weights
from flatout.models.blocks import replace_module, towers


class LoraLinear(nn.Module):
    """y = base(x) + scaling * B A dropout(x), the base frozen (Hu et al. 2021, arXiv:2106.09685).

    `lora_a` (r, in) and `lora_b` (out, r) are fp32 masters (fp64 over an fp64 base), cast to x's dtype for the
    products; `lora_b` starts at 0, so the layer starts equal to its base. With DoRA (arXiv:2402.09353) each row of
    W + scaling * B A is rescaled to the learned norm `magnitude` (out,).
    """

    def __init__(self, base: FrozenLinear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.scaling, self.dropout = config.rank, lora_scaling(config), config.dropout
        # the `FusedLora` that computes this layer, and the layer's index in it
        self.computed_by: tuple[Any, int] | None = None
        # a quantized layer dequantizes `weight` at each access
        self.compute_dtype = base.weight.dtype if isinstance(base, nn.Linear) else base.dtype
        device = next(base.parameters()).device
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        # uniform(-1/sqrt(in), 1/sqrt(in)) like PEFT; on the CPU, so that the result is the same on every device
        bound = 1 / math.sqrt(base.in_features)
        first = torch.empty(config.rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(first.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, config.rank, dtype=dtype, device=device))
        self.magnitude: nn.Parameter | None = nn.Parameter(self._row_lengths()) if config.dora else None

    @property
    def weight(self) -> torch.Tensor:
        """The frozen base weight (out, in): some models read a linear layer's weight for its dtype or device."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.computed_by is not None:
            fused, index = self.computed_by
            joint: torch.Tensor = fused.output(index, x)
            return joint
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
        """Return the L2 norm of each row of W + scaling * B A, (out,), without gradient (DoRA, section 4.3)."""
        lengths: torch.Tensor = self._sum().norm(dim=1)
        return lengths

    def _sum(self) -> torch.Tensor:
        total: torch.Tensor = self.base.weight.to(self.lora_a.dtype) + self.scaling * (self.lora_b @ self.lora_a)
        return total

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """Return the merged weight (out, in), computed in the masters' dtype and cast to the base's."""
        total = self._sum()
        if self.magnitude is not None:
            total = total * (self.magnitude / total.norm(dim=1))[:, None]
        return total.to(self.base.weight.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling:g}, dropout={self.dropout:g}"


def add_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> list[str]:
    """Freeze the model and replace the targeted linear layers by LoraLinear; return lines for the console.

    Targets: `all-linear` is every linear layer except the output head; a list matches full names or their last parts;
    another string is a regex over full names. Initial values depend only on `seed` and the module's name, not on the
    global random state or the order of modules. Raises UsageError, suggesting similar names, if a target matches
    nothing, and for a rank larger than any target's.
    """
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise UsageError("this model already has LoRA layers; merge or reload it first")
    targets = _targets(model, config.targets)
    largest = max(min(linear.in_features, linear.out_features) for linear in targets.values())
    if config.rank > largest:
        raise UsageError(f"lora.rank is {config.rank:,}, but no layer in lora.targets has a rank above {largest:,}")
    model.requires_grad_(False)
    for name, linear in targets.items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        replace_module(model, name, LoraLinear(linear, config, generator).train(linear.training))
    counts = Counter(name.rpartition(".")[2] for name in targets)
    num_trainable = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    lines = [
        f"{'DoRA' if config.dora else 'LoRA'} rank {config.rank}, alpha {config.alpha:g}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
        + f"; {num_trainable:,} trainable parameters ({num_trainable / num_weights(model):.2%})"
    ]
    # transformers keeps all experts of a layer in one 3-D parameter, which is not a linear layer
    if num_experts := sum(parameter.dim() == 3 for parameter in model.parameters()):
        lines.append(f"{num_experts} fused expert tensors get no adapter: LoRA only supports linear layers")
    return lines


def lora_scaling(config: LoraConfig) -> float:
    """Return the factor of B A x: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return all LoraLinear of a model by full module name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Make the model compute as its base does, inside a `with` block."""
    layers = lora_layers(model)
    for name, layer in layers.items():
        replace_module(model, name, layer.base)
    try:
        yield
    finally:
        for name, layer in layers.items():
            replace_module(model, name, layer)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; a tied one appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """Freeze every parameter with a regex match anywhere in its full name; return a line for the console.

    Raises UsageError if a pattern matches nothing, or if nothing is left to train.
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
    return f"frozen parameters: {', '.join(counts)}; {num_trainable:,} values are trained"


def freeze_unreached(model: PreTrainedModel) -> str | None:
    """Freeze parameters outside the decoder and the head, such as a vision tower's; return a line for the console.

    They would get no gradient, only weight decay. Returns None if there are none. Raises UsageError if nothing is left
    to train.
    """
    unreached = {name: parameter for name, parameter in towers(model).items() if parameter.requires_grad}
    if not unreached:
        return None
    for parameter in unreached.values():
        parameter.requires_grad_(False)
    owners = sorted({".".join(name.split(".")[:2]) for name in unreached})
    if not trainable_parameters(model):
        raise UsageError(
            f"nothing is left to train: text does not pass through {', '.join(owners)}; choose different lora.targets"
        )
    return f"{len(unreached)} parameters of {', '.join(owners)} stay frozen: text does not pass through them"


def _targets(model: PreTrainedModel, wanted: str | list[str]) -> dict[str, FrozenLinear]:
    head = model.get_output_embeddings()
    unread = towers(model)
    found_linears = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    linears = {name: module for name, module in found_linears.items() if f"{name}.weight" not in unread}
    if wanted == "all-linear":
        chosen = {name: module for name, module in linears.items() if module is not head}
        if not chosen:
            raise UsageError(f"lora.targets: model type {model.config.model_type} has no linear layer besides its head")
        return chosen
    matched: set[str] = set()
    for target in [wanted] if isinstance(wanted, str) else wanted:
        if isinstance(wanted, str):
            found = {name for name in linears if re.fullmatch(target, name)}
        else:
            found = {name for name in linears if f".{name}".endswith(f".{target}")}
        if not found:
            leaves = sorted({name.rpartition(".")[2] for name in linears})
            near = difflib.get_close_matches(target, leaves, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(leaves)}"
            raise UsageError(f"lora.targets: {target!r} matches no linear layer of this model; {hint}")
        matched |= found
    chosen = {name: module for name, module in linears.items() if name in matched}
    embedding = model.get_input_embeddings()
    if any(module is head and module.weight is embedding.weight for module in chosen.values()):
        raise UsageError("lora.targets: the output head is tied to the embeddings, so it cannot get its own adapter")
    return chosen
