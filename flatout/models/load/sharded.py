"""Deferred loading: weights stay memory-mapped until the model is sharded, so no device ever holds a full copy.

On the CPU, the tensors of transformers' loader are views of the mapped files, so each rank reads only its shard's pages
from disk. Quantized weights, which are not in any file, are kept in host memory. Before loading, parameters are on the
meta device, and start-up checks run on the first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import Fix, UsageError
from flatout.models.blocks import layer_list, replace_module
from flatout.models.masters import Dither

LocalShardFn = Callable[[Tensor], tuple[Tensor, tuple[int, ...], tuple[int, ...], bool]]
"""Maps a tensor to this rank's shard of it: (tensor sharing its storage, offset, global shape, is_copy)."""


class DeferredWeights:
    """A model's weights by name (tied ones under each name), as views of mapped files or in host memory.

    Creating it moves the model's parameters to the meta device, in `dtype`, and its buffers to the device. What
    transformers keeps in another dtype than the files' is not cast, and tied parameters stay tied. `dither` moves fp32
    masters as they are read.
    """

    def __init__(
        self, model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype, dither: Dither | None = None
    ) -> None:
        self._model, self._device, self._dither = model, device, dither
        # where a weight that was cut begins, by its dimension
        self._begins: dict[str, dict[int, int]] = {}
        files_dtype = model.dtype
        self._weights = {name: old.data for name, old in model.named_parameters(remove_duplicate=False)}
        dtypes = {name: dtype if old.dtype == files_dtype else old.dtype for name, old in self._weights.items()}
        _replace(model, lambda name, old: torch.empty_like(old, device="meta", dtype=dtypes[name]))
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        model.config.dtype = dtype

    def narrow(self, dims: Mapping[str, int], num_parts: int, index: int) -> None:
        """Keep one of equal parts of some weights, along their dimension, as the model's parameters were cut."""
        for name, dim in dims.items():
            if name in self._weights:
                parts = self._weights[name].chunk(num_parts, dim)
                self._weights[name] = parts[index]
                self._begins[name] = {dim: sum(part.shape[dim] for part in parts[:index])}

    def load(self, local_shard_of: LocalShardFn, *, offload: bool = False) -> None:
        """Load this rank's shards (FSDP2) or full tensors, once; `offload` keeps sharded ones in host memory."""

        def read(name: str, old: Tensor) -> Tensor:
            waits_on_host = offload and hasattr(old, "placements")
            new = torch.empty_like(old, device="cpu" if waits_on_host else self._device)
            local, offset, *_ = local_shard_of(new)
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True))
            local.copy_(self._weights[name][box])
            cut = self._begins.get(name, {})
            if self._dither is not None:
                self._dither.apply(name, local, [begin + cut.get(dim, 0) for dim, begin in enumerate(offset)])
            return new

        _replace(self._model, read)
        self._weights.clear()

    @contextmanager
    def first_layers(self) -> Iterator[None]:
        """Within this context, the model is on the device, with as many layers as include every kind; at least two."""
        config, (decoder, name) = self._model.config.get_text_config(), layer_list(self._model)
        layers, num_layers = decoder.get_submodule(name), config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or []
        num_shown = min(max([1, *map(kinds.index, kinds)]) + 1, num_layers)
        replace_module(decoder, name, nn.ModuleList(list(layers.children())[:num_shown]))
        config.num_hidden_layers = num_shown
        without_memory = _replace(self._model, lambda name, old: self._weights[name].to(self._device, old.dtype))
        try:
            yield
        finally:
            _replace(self._model, lambda name, _: without_memory[name])
            replace_module(decoder, name, layers)
            config.num_hidden_layers = num_layers


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, empty: PreTrainedModel) -> None:
    """Recompute the buffers that are not in any file, in the dtype of `empty`, the same model on the meta device.

    Raises UsageError if they differ by more than rounding.
    """
    owner = empty
    with torch.random.fork_rng(devices=[]):
        for name, module in empty.named_modules():
            owner = module if isinstance(module, PreTrainedModel) else owner
            holder = model.get_submodule(name)
            # computed buffers are recognized by their absence from the state dict
            saved = holder.state_dict(keep_vars=True)
            computed = [buffer for buffer, _ in holder.named_buffers(recurse=False) if buffer not in saved]
            if not computed:
                continue
            module.to_empty(device="cpu", recurse=False)
            owner._init_weights(module)
            for buffer in computed:
                old, new = holder.get_buffer(buffer), module.get_buffer(buffer)
                if not torch.equal(new.to(old.dtype), old):
                    raise UsageError(
                        f"model type {model.config.model_type} cannot load in shards: {name}.{buffer} reads weights",
                        [Fix({"strategy": "ddp"}), Fix({"strategy": "zero2"})],
                    )
                setattr(holder, buffer, new)


@torch.no_grad()
def _replace(model: nn.Module, make: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Replace every parameter by what `make` returns, a tied one once; return the old ones by name."""
    old: dict[str, Tensor] = {}
    new: dict[Tensor, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        old[name] = parameter
        if parameter not in new:
            made = make(name, parameter.detach())
            if not isinstance(made, nn.Parameter):
                made = nn.Parameter(made, requires_grad=parameter.requires_grad)
            new[parameter] = made
        replace_module(model, name, new[parameter])
    return old
