"""Low-rank adapters: each targeted linear layer is frozen and wrapped with two small trained matrices."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flatout.config.schema import LoraConfig
from flatout.errors import Fix, UsageError
from flatout.kernels.segmented import register_ops
from flatout.models.blocks import decoder_layers, layer_list, part_of, replace_module, towers
from flatout.models.experts.block import IMPLEMENTATION, computes_experts, prepare_experts, register_experts
from flatout.models.experts.lora import ExpertLora, expert_parameters, num_expert_tensors, plain_name
from flatout.models.frozen.frozen_experts import FrozenExperts
from flatout.models.frozen.frozen_linear import FrozenLinear, is_plain_linear, num_weights, product_of
from flatout.models.frozen.matmul import FrozenMatmul
from flatout.models.lora.saved import SavedModule, TrainedRows, add_saved_modules, saved_modules, saved_names
from flatout.models.lora.starts import AdapterPlace, AdapterStart, adapter_start, cpu_copy, first_values, uniform

# a matrix of fused experts: the name of the experts module, of the parameter, and the parameter
ExpertMatrix: TypeAlias = tuple[str, str, torch.Tensor | FrozenExperts]


class LoraLinear(nn.Module):
    """y = base(x) + scaling * B A dropout(x), the base frozen (Hu et al. 2021, arXiv:2106.09685).

    `lora_a` (r, in) and `lora_b` (out, r) are fp32 masters (fp64 over an fp64 base), cast to x's dtype for the
    products; `lora_b` starts at 0, so the layer starts equal to its base. With DoRA (arXiv:2402.09353) each row of
    W + scaling * B A is rescaled to the learned norm `magnitude` (out,).
    """

    # the weights of `base` are read without calling it
    reads_submodules = True

    def __init__(
        self, base: FrozenLinear, config: LoraConfig, generator: torch.Generator, start: AdapterStart = uniform
    ) -> None:
        super().__init__()
        register_ops()
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.scaling, self.dropout = config.rank, lora_scaling(config), config.dropout
        # the `FusedLora` that computes this layer, and the layer's index in it
        self.computed_by: tuple[Any, int] | None = None
        # a quantized layer dequantizes `weight` at each access
        self.compute_dtype = base.weight.dtype if isinstance(base, nn.Linear) else base.dtype
        device = next(base.parameters()).device
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        place = AdapterPlace(config.rank, base.in_features, lambda: cpu_copy(base.weight), config.rank)
        self.lora_a = nn.Parameter(first_values(start, place, generator, device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, config.rank, dtype=dtype, device=device))
        self.magnitude: nn.Parameter | None = nn.Parameter(self._row_lengths()) if config.dora else None

    @property
    def weight(self) -> torch.Tensor:
        """The frozen base weight (out, in): some models read a linear layer's weight for its dtype or device."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The frozen base bias (out,), which some models read beside the layer's output."""
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.computed_by is not None:
            fused, index = self.computed_by
            return fused.output(index, x)
        bias = self.base.bias
        matmul, storage = product_of(self.base)
        adapter = self.lora_a, self.lora_b, self.scaling, self.dropout if self.training else 0.0
        if self.magnitude is None:
            output: torch.Tensor = LoraProduct.apply(x, *adapter, None, matmul, *storage)
            return output if bias is None else output + bias.to(x.dtype)
        # in fp32, as a number of 16 bits times a ratio near 1 is rounded back to itself
        exact = torch.promote_types(x.dtype, torch.float32)
        ratio = (self.magnitude / self._row_lengths()).to(exact)
        frozen, *dropped, low = LoraProduct.apply(x, *adapter, exact, matmul, *storage)
        output = frozen + (ratio - 1) * (dropped[0] if dropped else frozen) + ratio * low
        return (output if bias is None else output + bias).to(x.dtype)

    @torch.no_grad()
    def _row_lengths(self) -> torch.Tensor:
        """Return the L2 norm of each row of W + scaling * B A, (out,), without gradient (DoRA, section 4.3)."""
        return self._sum().norm(dim=1)

    def change(self, x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds to `frozen` = x W.T (..., out), without dropout, in the dtype of x (..., in)."""
        low = self.scaling * (x @ self.lora_a.to(x.dtype).T) @ self.lora_b.to(x.dtype).T
        if self.magnitude is None:
            return low
        return (self.magnitude / self._row_lengths()).to(x.dtype) * (frozen + low) - frozen

    def _sum(self) -> torch.Tensor:
        return self.base.weight.to(self.lora_a.dtype) + self.scaling * (self.lora_b @ self.lora_a)

    @torch.no_grad()
    def merge(self) -> None:
        """Copy the merged weight into the base."""
        self.base.weight.copy_(self.merged_weight())

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """Return the merged weight (out, in), computed in the masters' dtype and cast to the base's."""
        total = self._sum()
        if self.magnitude is not None:
            total = total * (self.magnitude / total.norm(dim=1))[:, None]
        return total.to(self.base.weight.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling:g}, dropout={self.dropout:g}"


def add_lora(
    model: PreTrainedModel, config: LoraConfig, *, seed: int, rows: Mapping[str, Sequence[int]] | None = None,
    parts: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Freeze the model and replace the targeted linear layers by LoraLinear; return lines for the console.

    Modules of `lora.modules_to_save` and `rows` of tokens are trained beside them, as in `add_saved_modules`. Targets:
    `all-linear` is every linear layer except the output head; a list matches full names or their last parts; another
    string is a regex over full names; all only in `lora.layers`, and in the decoder of texts or these `parts` (of
    `blocks.PARTS`). All but `all-linear` also match matrices of fused
    experts. Initial values depend only on `seed` and the target's name, not on the global random state or the order of
    modules. Raises UsageError, suggesting similar names, if a target matches nothing, and for a rank larger than any
    target's.
    """
    if lora_layers(model):
        raise UsageError("this model already has LoRA layers; merge or reload it first")
    targets, ranks = choose_targets(model, config, parts)
    start = adapter_start(config)
    linears = {name: target for name, target in targets.items() if isinstance(target, nn.Module)}
    experts = {name: target for name, target in targets.items() if isinstance(target, tuple)}
    model.requires_grad_(False)
    for name, linear in linears.items():
        layer = LoraLinear(linear, config.of_layer(name), _generator(seed, name), start)
        replace_module(model, name, layer.train(linear.training))
    if experts:
        register_experts()
        model.set_experts_implementation(IMPLEMENTATION)
        prepare_experts(model)
        if not computes_experts(model):
            raise UsageError(
                f"lora.targets: experts of model type {model.config.model_type} are normalized one by one, which has "
                "no grouped form; leave experts out"
            )
    for name, (path, parameter, _) in experts.items():
        lora, base = config.of_layer(name), model.get_submodule(path)
        adapted = ExpertLora(
            base, parameter, rank=lora.rank, scaling=lora_scaling(lora), generator=_generator(seed, name), start=start
        )
        replace_module(model, path, adapted.train(base.training))
    saved = add_saved_modules(model, config, rows or {})
    counts = Counter(name.rpartition(".")[2] for name in targets)
    num_trainable = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    lines = [
        f"{'DoRA' if config.dora else 'LoRA'} rank {', '.join(map(str, sorted(set(ranks.values()))))}, "
        f"alpha {config.alpha:g}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
        + f"; {num_trainable:,} trainable parameters ({num_trainable / num_weights(model):.2%})",
        *saved,
    ]
    if others := num_expert_tensors(model) - len(experts):
        lines.append(f"{others} fused expert tensors get no adapter: add experts to lora.targets to adapt them")
    return lines


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def lora_scaling(config: LoraConfig) -> float:
    """Return the factor of B A x: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear | ExpertLora]:
    """Return all adapters of a model by full module name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear | ExpertLora)}


def target_name(name: str, layer: LoraLinear | ExpertLora) -> str:
    """Return the full name of what the adapter with this module name adapts: a linear layer, or experts' matrix."""
    if isinstance(layer, LoraLinear):
        return name
    return f"{plain_name(name)}.{layer.parameter}"


def adapted_modules(model: nn.Module) -> dict[str, LoraLinear | ExpertLora | SavedModule | TrainedRows]:
    """Return all modules that hold something trained and, as `base`, what they replaced, by full name."""
    return {**lora_layers(model), **saved_modules(model)}


def remove_adapter(model: nn.Module) -> None:
    """Put back the modules that `add_lora` replaced."""
    # adapters of experts are nested: from the inside
    for name, layer in reversed(adapted_modules(model).items()):
        replace_module(model, name, layer.base)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Make the model compute as its base does, inside a `with` block.

    Modules that are trained in full and rows of new tokens are the base's, too.
    """
    layers = adapted_modules(model)
    remove_adapter(model)
    try:
        yield
    finally:
        for name, layer in layers.items():
            replace_module(model, name, layer)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; a tied one appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """Return the names of the weights of the decoder layers' linear layers, and of A and B of plain LoRA layers.

    Embeddings, the head, routers, and stacked experts with their adapters are not among them. Raises like `layer_list`.
    """
    inside = {part for layer in decoder_layers(model) for part in layer.modules()}
    names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            names |= {f"{path}.lora_a", f"{path}.lora_b"}
        elif module in inside and isinstance(module, nn.Linear | Conv1D):
            names.add(f"{path}.weight")
    return names


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


def freeze_unreached(model: PreTrainedModel, parts: Collection[str] = ()) -> str | None:
    """Freeze parameters outside the decoder, the head and `parts`, such as a vision tower's; return a line.

    They would get no gradient, only weight decay. Returns None if there are none. Raises UsageError if nothing is left
    to train, also in one of these parts.
    """
    unreached = {name: parameter for name, parameter in towers(model, parts).items() if parameter.requires_grad}
    trained = {part_of(name) for name in towers(model).keys() & trainable_parameters(model).keys()}
    for part in sorted(set(parts) - trained):
        raise UsageError(
            f"model.freeze_{part}: false, but nothing of it is trained: add it to lora.targets or modules_to_save",
            [Fix({f"model.freeze_{part}": True})],
        )
    if not unreached:
        return None
    for parameter in unreached.values():
        parameter.requires_grad_(False)
    owners = sorted({".".join(name.split(".")[:2]) for name in unreached})
    if not trainable_parameters(model):
        raise UsageError(
            f"nothing is left to train: text does not pass through {', '.join(owners)}; choose different lora.targets"
        )
    return f"{len(unreached)} parameters of {', '.join(owners)} stay frozen: they are outside the decoder of texts"


def choose_targets(
    model: PreTrainedModel, config: LoraConfig, parts: Collection[str] = ()
) -> tuple[dict[str, FrozenLinear | ExpertMatrix], dict[str, int]]:
    """Return what gets an adapter, by name, and the rank of each. Raises UsageError as `add_lora` does.

    The model may be on the meta device.
    """
    targets, chosen = config.targets, _named_targets(model, config, parts)
    saved = tuple(f"{name}." for name in saved_names(model, config))
    if saved and (unread := next((name for name in towers(model, parts) if name.startswith(saved)), None)):
        part, owner = part_of(unread), next(name for name in saved if unread.startswith(name)).removesuffix(".")
        raise UsageError(
            f"lora.modules_to_save: {owner} is in the {part.replace('_', ' ') or 'audio tower'}, which stays frozen",
            [Fix({f"model.freeze_{part}": False})] if part else [],
        )
    chosen = {name: linear for name, linear in chosen.items() if not f"{name}.".startswith(saved)} if saved else chosen
    if (indices := config.layer_indices) is not None:
        decoder, inner = layer_list(model)
        layers = decoder.get_submodule(inner)
        path = next(name for name, module in model.named_modules() if module is layers)
        if indices[-1] >= len(layers):
            raise UsageError(
                f"lora.layers: there is no layer {indices[-1]}; the model has layers 0 to {len(layers) - 1}"
            )
        chosen = {name: linear for name, linear in chosen.items() if config.has_layer(name, path)}
    if not chosen:
        raise UsageError(
            f"lora.targets: {targets!r} matches nothing in lora.layers that lora.modules_to_save does not train in full"
        )
    unsupported = {"lora.dropout": config.dropout, "lora.dora": config.dora}
    if experts := [name for name, target in chosen.items() if isinstance(target, tuple)]:
        for setting in (name for name, used in unsupported.items() if used):
            raise UsageError(
                f"{setting}: adapters of fused experts ({experts[0]}) lack it, as in PEFT",
                [
                    Fix({setting: 0 if setting == "lora.dropout" else False}),
                    Fix({}, "leave experts out of lora.targets"),
                ],
            )
    ranks = {name: config.of_layer(name).rank for name in chosen}
    largest = max(
        min(target[2].shape[1:] if isinstance(target, tuple) else (target.in_features, target.out_features))
        for target in chosen.values()
    )
    if (rank := max(ranks.values())) > largest:
        raise UsageError(f"lora.rank is {rank:,}, but no layer in lora.targets has a rank above {largest:,}")
    return chosen, ranks


def _named_targets(
    model: PreTrainedModel, config: LoraConfig, parts: Collection[str]
) -> dict[str, FrozenLinear | ExpertMatrix]:
    head = model.get_output_embeddings()
    unread = towers(model, parts)
    linears = {
        name: module
        for name, module in model.named_modules()
        if is_plain_linear(module) and f"{name}.weight" not in unread
    }
    experts = expert_parameters(model)
    everything: dict[str, FrozenLinear | ExpertMatrix] = {**linears, **experts}
    matched: set[str] = set()
    for target in config.listed_targets:
        targets = {name for name in everything if config.selects(target, name, of_experts=name in experts)}
        if target == "all-linear":
            targets = {name for name in targets if linears[name] is not head}
        if not targets:
            kind = model.config.model_type
            if target == "all-linear":
                raise UsageError(f"lora.targets: model type {kind} has no linear layer besides its head")
            frozen = {name.removesuffix(".weight") for name in unread}
            if part := next((part_of(name) for name in sorted(frozen) if config.selects(target, name)), ""):
                raise UsageError(
                    f"lora.targets: {target!r} is only in the {part.replace('_', ' ')}, which stays frozen",
                    [Fix({f"model.freeze_{part}": False})],
                )
            leaves = sorted({name.rpartition(".")[2] for name in everything})
            near = difflib.get_close_matches(target, [*leaves, "all-linear"], n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(leaves)}"
            meant = [(near or ["all-linear"])[0] if listed == target else listed for listed in config.listed_targets]
            fix = Fix({"lora.targets": meant})
            raise UsageError(f"lora.targets: {target!r} matches no linear layer of this model; {hint}", [fix])
        matched |= targets
    chosen = {name: target for name, target in everything.items() if name in matched}
    embedding = model.get_input_embeddings()
    if any(chosen.get(name) is head and module.weight is embedding.weight for name, module in linears.items()):
        raise UsageError("lora.targets: the output head is tied to the embeddings, so it cannot get its own adapter")
    return chosen


class LoraProduct(torch.autograd.Function):
    """x W.T + low B.T with low = scaling * D(x) A.T, no small part of which is rounded away; x is (..., K).

    D drops values of x with the probability `dropout`. A (r, K) and B (N, r) are masters, cast to x's dtype; their
    gradients have the masters' dtype, and on CUDA their sums over tokens are not rounded to x's. `storage` is that of
    W. With `exact`, fp32 or fp64, the results are the terms that DoRA scales before it adds and rounds them: x W.T in
    that dtype, D(x) W.T if there is dropout, and low B.T.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float, exact: torch.dtype | None,
        matmul: FrozenMatmul, *storage: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        dropped, mask = torch.native_dropout(x, dropout, True) if dropout else (x, None)
        master_dtype, a, b = a.dtype, a.to(x.dtype), b.to(x.dtype)
        low = F.linear(dropped, a) * scaling
        ctx.save_for_backward(dropped, mask, low, a, b, *storage)
        ctx.matmul, ctx.scaling, ctx.dropout, ctx.dtype = matmul, scaling, dropout, master_dtype
        operands = matmul.forward(x, *storage)
        if exact is None:
            (output,) = operands.multiply_with_lora(low, b, use_kernel=False)
            return output
        frozen = operands.multiply_and_add(x.new_zeros(*x.shape[:-1], len(b), dtype=exact))
        of_dropped = [matmul.forward(dropped, *storage).multiply(dropped)] if dropout else []
        return frozen, *of_dropped, F.linear(low, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dropped, mask, low, a, b, *storage = ctx.saved_tensors
        # with a single result, all of it is the sum
        grad, adapter_grad = grads[0].to(dropped.dtype), grads[-1]
        low_grad = (adapter_grad @ b) * ctx.scaling
        x_grad = None
        if ctx.needs_input_grad[0]:
            operands = ctx.matmul.backward([grad], *storage)
            if mask is None:
                (x_grad,) = operands.multiply_with_lora(low_grad, a.t(), use_kernel=False)
            else:
                grad_in = low_grad @ a
                for dropped_grad in grads[1:-1]:
                    grad_in = ctx.matmul.backward([dropped_grad], *storage).multiply_and_add(grad_in)
                grad_in = torch.ops.aten.native_dropout_backward(grad_in, mask, 1 / (1 - ctx.dropout))
                x_grad = operands.multiply_and_add(grad_in)
        a_grad = over_tokens(low_grad, dropped, ctx.dtype)
        return x_grad, a_grad, over_tokens(adapter_grad, low, ctx.dtype), *(None,) * (4 + len(storage))


def over_tokens(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left.T right (N, K) of left (..., N) and right (..., K), summed over all tokens, in `dtype`."""
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    if left.is_cuda and left.dtype != dtype == torch.float32:
        # not rounded to the compute dtype
        return torch.mm(left.t(), right, out_dtype=dtype)
    return (left.t() @ right).to(dtype)
