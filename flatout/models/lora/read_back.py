"""Compare what PEFT reads from an adapter's files with the weights that were trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.models.blocks import replace_module
from flatout.models.experts.lora import ExpertLora
from flatout.models.load.auto_class import is_scoring
from flatout.models.lora.adapter import adapter_parameters, apply_adapter, as_written, in_peft_shapes, same_values
from flatout.models.lora.layer import LoraLinear, adapted_modules, lora_layers, remove_adapter, target_name
from flatout.models.lora.plain import ADAPTER_NAME, borrow_weights, peft_state, plain_copy

# relative tolerance between PEFT's logits and ours, for the median token: both add the same terms in another order.
# In 16 bits, rounding alone can differ more than a wrong adapter of few layers, so logits say nothing there.
LOGIT_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
# relative tolerance between two layers' changes: PEFT rounds those of experts to the base's 16 bits
CHANGE_TOLERANCE = 1e-2


class PeftReading(NamedTuple):
    """What PEFT makes of an adapter's files, in a line, and whether that is the adapter that was trained."""

    text: str
    is_same: bool


def read_back(
    model: PreTrainedModel, folder: Path, *, live: Mapping[str, Tensor] | None = None, has_diverged: bool = False
) -> PeftReading:
    """Compare the adapter that PEFT reads from `folder` with the live one.

    Its tensors must have the names, shapes and values of `live` (like `adapter_parameters`' result, gathered if the
    model's own tensors are sharded), and each layer must change its weight as the live layer does, within
    CHANGE_TOLERANCE. Over base weights of 32 bits or more, which are used in place, logits on 16 tokens must also equal
    those of the adapter as flatout reads it, within LOGIT_TOLERANCES, unless training `has_diverged`: huge weights turn
    last bits into any logits. Where the run has filled its GPU, the CPU compares the changes.
    """
    live = {name: one.detach() for name, one in adapter_parameters(model).items()} if live is None else live
    with suppress(torch.OutOfMemoryError):
        return _read_on(model.device, model, folder, live, has_diverged)
    torch.cuda.empty_cache()
    return _read_on(torch.device("cpu"), model, folder, live, has_diverged)


def _read_on(
    device: torch.device, model: PreTrainedModel, folder: Path, live: Mapping[str, Tensor], has_diverged: bool
) -> PeftReading:
    import peft

    parameters = adapter_parameters(model)
    plain, ours, has_logits = plain_copy(model), None, model.dtype in LOGIT_TOLERANCES and not has_diverged
    if has_logits and device == model.device and borrow_weights(plain, model):
        apply_adapter(plain, folder)
        logits = _outputs_of_short_text(plain.eval())
        remove_adapter(plain)
        plain.set_experts_implementation("eager")
        ours = logits if bool(logits.isfinite().all()) else None
    else:
        _hold_zeros(plain, device)
    with warnings.catch_warnings(action="ignore"):
        wrapped = peft.PeftModel.from_pretrained(plain, str(folder), torch_device=str(device)).eval()
    problems = _odd_tensors(peft_state(wrapped), as_written(model, in_peft_shapes(live)))
    changes = _compare_changes(device, model, wrapped, {id(one): live[name] for name, one in parameters.items()})
    if odd := {name: error for name, error in changes.items() if not error <= CHANGE_TOLERANCE}:
        worst = max(odd, key=lambda name: odd[name])
        problems.append(f"{worst} changes its weight by another value: {odd[worst]:.1e} apart ({len(odd)} such layers)")
    proved = f"changes within {max(changes.values(), default=0.0):.0e}"
    if ours is not None and not problems:
        theirs, limit = _outputs_of_short_text(wrapped), LOGIT_TOLERANCES[model.dtype]
        error = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
        if not error <= limit:
            problems.append(f"logits differ by {error:.1e} (limit {limit:.0e})")
        proved += f", logits within {error:.0e}"
    if problems:
        text = f"PEFT {peft.__version__} reads a different adapter: {problems[0]} ({len(problems)} differences)"
        return PeftReading(f"{text}; checkpoints/ has the weights as trained; please report this", is_same=False)
    count = len(adapted_modules(model))
    return PeftReading(f"PEFT {peft.__version__} reads the same adapter: {count} layers, {proved}", is_same=True)


def _hold_zeros(plain: PreTrainedModel, device: torch.device) -> None:
    """Give a model on the meta device weights that take no memory: PEFT puts an adapter where its base is."""
    for name, parameter in plain.named_parameters():
        zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        replace_module(plain, name, nn.Parameter(zeros, requires_grad=False))


def _odd_tensors(read: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} is {'missing' if name not in read else 'unknown' if name not in written else 'different'}"
        for name in sorted(read.keys() | written.keys())
        if name not in read or name not in written or not same_values(read[name], written[name])
    ]


@torch.no_grad()
def _compare_changes(
    device: torch.device, model: PreTrainedModel, wrapped: Any, live: Mapping[int, Tensor]
) -> dict[str, float]:
    """Return the relative distance between PEFT's change and the live one, of each layer that either adapts.

    `live` holds the values of the live parameters by their ids.
    """
    from peft.tuners.lora import LoraLayer

    theirs: dict[str, Any] = {}
    for path, module in wrapped.base_model.model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER_NAME in module.lora_A:
            parameter = getattr(module, "parameter_name", "weight")
            name = path.replace(".base_layer", "")
            theirs[name if parameter == "weight" else f"{name}.{parameter}"] = module
    errors = {}
    layers = {target_name(name, layer): layer for name, layer in lora_layers(model).items()}
    for name, layer in layers.items():
        if name not in theirs:
            errors[name] = float("inf")
            continue
        a, b = (live[id(factor)].to(device) for factor in (layer.lora_a, layer.lora_b))
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for own, other in zip(_live_changes(layer, a, b), _peft_changes(theirs[name], layer), strict=True):
            squares += torch.stack([(other.to(own.dtype) - own).square().sum(), own.square().sum()]).double()
        difference, size = squares.sqrt().tolist()
        errors[name] = difference / size if size else 0.0 if difference == 0.0 else float("inf")
        if layer.magnitude is not None:
            stored = theirs[name].lora_magnitude_vector[ADAPTER_NAME].weight
            if not same_values(stored, live[id(layer.magnitude)]):
                errors[name] = float("inf")
    return errors | {name: float("inf") for name in theirs.keys() - layers.keys()}


def _live_changes(layer: LoraLinear | ExpertLora, a: Tensor, b: Tensor) -> Iterator[Tensor]:
    if isinstance(layer, LoraLinear):
        yield layer.scaling * (b @ a)
        return
    of_experts = a.view(layer.num_experts, layer.rank, -1)
    for expert in range(layer.num_experts):
        yield layer.scaling * (b[..., expert] @ of_experts[expert])


def _peft_changes(module: Any, layer: LoraLinear | ExpertLora) -> Iterator[Tensor]:
    changes = module.get_delta_weight(ADAPTER_NAME)
    if isinstance(layer, LoraLinear):
        yield changes
        return
    for change in changes:
        yield change.T if layer.experts.is_transposed else change


@torch.no_grad()
def _outputs_of_short_text(model: Any) -> Tensor:
    """Return the logits (16, V), at least fp32, of a transformers or PEFT model for sixteen fixed tokens.

    Of a model that scores, these are the last hidden states (16, D).
    """
    embedding, scores = model.get_input_embeddings().weight, is_scoring(model.config)
    token_ids = (torch.arange(16, device=embedding.device) * 7919 + 3) % len(embedding)
    output = model(input_ids=token_ids[None], use_cache=False, **({"output_hidden_states": True} if scores else {}))
    outputs: Tensor = output.hidden_states[-1][0] if scores else output.logits[0]
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
