"""What is trained beside low-rank adapters: whole modules, and the rows of new tokens in embedding and head."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import ERROR, LogRecord
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from flatout.config.schema import LoraConfig
from flatout.errors import Fix, UsageError
from flatout.models.blocks import replace_module
from flatout.models.frozen.frozen_linear import Fp8Linear, Nf4Linear


class SavedModule(nn.Module):
    """A module trained in full beside the frozen `base`, as PEFT's modules_to_save.

    `trained` is a copy with fp32 masters (fp64 over fp64), cast to the base's dtype in each forward pass. `tied` is
    another module's master of the same weight, to share.
    """

    def __init__(self, base: nn.Module, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        # first, as transformers takes a model's dtype from its first parameter
        self.base = base.requires_grad_(False)
        self.dtypes = {name: parameter.dtype for name, parameter in base.named_parameters()}
        self.trained = copy.deepcopy(base)
        for name, parameter in list(self.trained.named_parameters()):
            master = nn.Parameter(parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32)))
            replace_module(self.trained, name, master if tied is None else tied)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # models read a module's weight, sizes or epsilon
            value = getattr(super().__getattr__("trained"), name)
            return value.to(self.dtypes[name]) if isinstance(value, nn.Parameter) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the base computes, with the trained weights."""
        if type(self.trained) is nn.Embedding:
            # the same rows as of a narrow copy, without that copy, and with gradients summed in fp32
            return self.trained(*args, **kwargs).to(self.dtypes["weight"])
        narrow = {name: parameter.to(self.dtypes[name]) for name, parameter in self.trained.named_parameters()}
        return torch.func.functional_call(self.trained, narrow, args, kwargs)

    @torch.no_grad()
    def merge(self) -> None:
        """Copy the trained weights into the base."""
        for weight, trained in zip(self.base.parameters(), self.trained.parameters(), strict=True):
            weight.copy_(trained)


class TrainedRows(nn.Module):
    """An embedding or a head whose rows `token_ids` (n,) are trained: PEFT's trainable_token_indices.

    `rows` are fp32 masters (fp64 over fp64), shared with the module `tied` if both have the same weight.
    """

    token_ids: Tensor
    places: Tensor

    def __init__(self, base: nn.Embedding | nn.Linear, token_ids: Sequence[int], tied: TrainedRows | None) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        # also on the meta device, which holds no values
        self.listed_ids = list(token_ids)
        weight, ids = base.weight.detach(), torch.tensor(self.listed_ids, device=base.weight.device)
        self.is_tied = tied is not None
        first = weight[ids].to(torch.promote_types(weight.dtype, torch.float32))
        # a module of its own after the base, as transformers takes a model's dtype from its first parameter
        self.trained = nn.ParameterDict({"rows": nn.Parameter(first) if tied is None else tied.rows})
        # the row of each token of the vocabulary, -1 for frozen ones
        places = torch.full((len(weight),), -1, device=weight.device)
        places[ids] = torch.arange(len(ids), device=weight.device)
        self.register_buffer("token_ids", ids, persistent=False)
        self.register_buffer("places", places, persistent=False)

    @property
    def rows(self) -> nn.Parameter:
        """The trained rows (n, D)."""
        return self.trained["rows"]

    @property
    def weight(self) -> Tensor:
        """The whole weight (V, D), with the trained rows."""
        return self.base.weight.index_copy(0, self.token_ids, self.rows.to(self.base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids (...) to rows (..., D), or hidden states (..., D) to logits (..., V)."""
        if isinstance(self.base, nn.Linear):
            return F.linear(x, self.weight)
        frozen: Tensor = self.base(x)
        places = self.places[x]
        trained = F.embedding(places.clamp(min=0), self.rows).to(frozen.dtype)
        if (scale := getattr(self.base, "embed_scale", None)) is not None:
            trained = trained * torch.as_tensor(scale, device=trained.device).to(frozen.dtype)
        return torch.where((places >= 0)[..., None], trained, frozen)

    @torch.no_grad()
    def merge(self) -> None:
        """Copy the trained rows into the base."""
        self.base.weight.index_copy_(0, self.token_ids, self.rows.to(self.base.weight.dtype))


def add_saved_modules(model: PreTrainedModel, config: LoraConfig, rows: Mapping[str, Sequence[int]]) -> list[str]:
    """Wrap the modules of `lora.modules_to_save`, and those whose `rows` (token ids by module name) are trained.

    Returns lines for the console. Raises UsageError for a name that matches nothing, and modules that PEFT cannot save.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = saved_names(model, config)
    is_tied = ties_ends(model)
    shared: nn.Parameter | None = None
    for name in names:
        base = model.get_submodule(name)
        if any(isinstance(module, Fp8Linear | Nf4Linear) for module in base.modules()):
            raise UsageError(f"lora.modules_to_save: {name} is quantized in the model's files; use the 16-bit model")
        if base.state_dict().keys() != dict(base.named_parameters()).keys() or not base.state_dict():
            raise UsageError(f"lora.modules_to_save: {name} has no weights, or state that is not trained; leave it out")
        ties = is_tied and config.keep_tied and base in (embedding, head)
        wrapped = SavedModule(base, shared if ties else None)
        shared = wrapped.trained.weight if ties else shared  # type: ignore[assignment]
        replace_module(model, name, wrapped.train(base.training))
    lines = [f"trained in full: {', '.join(names)}"] if names else []
    if shared is not None:
        lines.append("the head and the embeddings are tied and train as one; lora.keep_tied=false separates them")
    first: TrainedRows | None = None
    of_head = next((name for name, module in model.named_modules() if module is head), "")
    for name, token_ids in (dict(rows) | ({of_head: next(iter(rows.values()))} if is_tied and rows else {})).items():
        base = model.get_submodule(name)
        if isinstance(base, nn.Linear) and base.bias is not None:
            raise UsageError(
                f"data.new_tokens: {name} has a bias, which PEFT drops",
                [Fix({"lora.modules_to_save": [*config.modules_to_save, name]}, "all of it is trained")],
            )
        first = TrainedRows(base, token_ids, first if is_tied else None)
        replace_module(model, name, first.train(base.training))
        lines.append(f"{name}: {len(token_ids)} rows are trained")
    return lines


def saved_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the full names of `lora.modules_to_save`; tied embeddings and head come together with `lora.keep_tied`."""
    modules = dict(model.named_modules())
    names: dict[str, None] = {}
    for ending in config.modules_to_save:
        matched = [name for name in modules if name and f".{name}".endswith(f".{ending}")]
        if not matched:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in modules if not name[-1:].isdigit()} - {""}))
            raise UsageError(f"lora.modules_to_save: {ending!r} matches no module of this model; it has {ends}")
        names |= dict.fromkeys(matched)
    inner = [name for name in names if any(name.startswith(f"{other}.") for other in names)]
    if inner:
        raise UsageError(f"lora.modules_to_save: {inner[0]} is inside another module of the list; remove one")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if config.keep_tied and ties_ends(model):
        tied = [name for name, module in modules.items() if module in (embedding, head)]
        if names.keys() & set(tied):
            # the embedding first, as PEFT ties the head to it
            names = dict.fromkeys(sorted(tied, key=lambda name: modules[name] is head)) | names
    return list(names)


def rows_of_tokens(model: PreTrainedModel, config: LoraConfig, token_ids: Sequence[int]) -> dict[str, list[int]]:
    """Return the token ids to train of embedding and head by module name, once for tied ones.

    Modules that are trained in full are left out. Raises UsageError if only one of two tied modules is.
    """
    saved = {model.get_submodule(name) for name in saved_names(model, config)}
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    names = {module: name for name, module in model.named_modules() if module in ends}
    rest = [end for end in ends if end not in saved]
    if token_ids and ties_ends(model) and len(rest) == 1:
        why = "with new tokens, tied embeddings and head train alike"
        raise UsageError(f"lora.keep_tied: {why}", [Fix({"lora.keep_tied": True})])
    return {names[end]: list(token_ids) for end in (rest[:1] if ties_ends(model) else rest)} if token_ids else {}


def saved_modules(model: nn.Module) -> dict[str, SavedModule | TrainedRows]:
    """Return what is trained beside LoRA layers, by full module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SavedModule | TrainedRows)}


def ties_ends(model: PreTrainedModel) -> bool:
    """Whether the (base's) head and embedding are one weight."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (getattr(end, "base", end) for end in ends)
    return head is not None and head.weight is embedding.weight


def untie(model: PreTrainedModel) -> None:
    """Give the head a weight of its own if it or the embedding is trained apart from the other.

    The configuration says so then, and transformers writes and reads both weights.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    masters = {end.trained.weight if isinstance(end, SavedModule) else None for end in ends}
    if ties_ends(model) and len(masters) > 1:
        head = getattr(ends[1], "base", ends[1])
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


@contextmanager
def without_reports() -> Iterator[None]:
    """Keep transformers from reporting what it does to weights: those that matter are reported by the caller.

    Filters of its own rather than a level, as other threads may load models meanwhile.
    """

    def is_error(record: LogRecord) -> bool:
        return record.levelno >= ERROR

    handlers = list(logging.get_logger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(is_error)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_error)


def grow_vocabulary(model: PreTrainedModel, num_rows: int, *, seed: int = 0) -> None:
    """Add rows for new tokens to embedding and head, as transformers starts them: near the mean of the others.

    Does nothing if there are `num_rows` already. Computed on the CPU, so that every device starts with the same values.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    device = embedding.weight.device
    if num_rows <= len(embedding.weight):
        return
    ends = [end for end in (embedding, head) if end is not None]
    frozen = {end.weight.requires_grad for end in ends} == {False}
    for end in ends:
        end.to("cpu")
    with torch.random.fork_rng(devices=[]), without_reports():
        torch.manual_seed(seed)
        model.resize_token_embeddings(num_rows)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        if end is not None:
            end.to(device).requires_grad_(not frozen)
