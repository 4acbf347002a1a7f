"""A model of which each rank holds a part, never whole on a device: its weights stay in mapped files until then.

transformers' loader reads on the CPU, where its tensors are views of the mapped files, so that it decides every rename,
fusion and tie, and only the pages of a rank's own part are read from disk. Quantised weights, which are in no file,
wait in host memory. Between, the model has no memory; start-up checks run on its first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.models.blocks import decoder_layers

LocalPart = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]
"""A tensor to this rank's part of it (its live storage) and that part's offset."""


class WaitingWeights:
    """A model's weights, taken out of it: mapped files' views or in host memory, by name, tied ones under each name.

    Taking them leaves the model's parameters without memory, in `dtype`; what transformers keeps in another precision
    than the files' stays so, tied parameters stay one, and buffers come to the device.
    """

    def __init__(self, model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device = model, device
        files_dtype = model.dtype
        self._weights = {name: old.data for name, old in model.named_parameters(remove_duplicate=False)}

        def empty(name: str, old: Tensor) -> Tensor:
            return torch.empty_like(old, device="meta", dtype=dtype if old.dtype == files_dtype else old.dtype)

        _replace(model, empty)
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        model.config.dtype = dtype

    def load(self, local_part: LocalPart, *, offload: bool = False) -> None:
        """Give the model's parameters, cut (FSDP2) or whole, this rank's part, once; `offload` puts cut ones in host
        memory."""

        def read(name: str, old: Tensor) -> Tensor:
            waits_on_host = offload and hasattr(old, "placements")
            new = torch.empty_like(old, device="cpu" if waits_on_host else self._device)
            local, offset = local_part(new)
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True))
            local.copy_(self._weights[name][box])
            return new

        _replace(self._model, read)
        self._weights.clear()

    @contextmanager
    def first_layers(self) -> Iterator[None]:
        """Within, the model is a short one on the device: as many of its first layers as show every kind."""
        config, decoder = self._model.config.get_text_config(), self._model.get_decoder()
        layers, num_layers = decoder_layers(self._model), config.num_hidden_layers
        name = next(name for name, child in decoder.named_children() if list(child.children()) == layers)
        whole: nn.ModuleList = getattr(decoder, name)
        setattr(decoder, name, nn.ModuleList(layers[: num_shown(config)]))
        config.num_hidden_layers = num_shown(config)
        without_memory = _replace(self._model, lambda name, old: self._weights[name].to(self._device, old.dtype))
        try:
            yield
        finally:
            _replace(self._model, lambda name, _: without_memory[name])
            setattr(decoder, name, whole)
            config.num_hidden_layers = num_layers


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, empty: PreTrainedModel) -> None:
    """Give a model the buffers that no file holds as `empty`, the same without memory in another dtype, computes them.

    Raises UsageError where it computes others than by rounding.
    """
    owner = empty
    with torch.random.fork_rng(devices=[]):
        for name, module in empty.named_modules():
            owner = module if isinstance(module, PreTrainedModel) else owner
            held = model.get_submodule(name)
            # their only public sign is that the state does not have them
            saved = held.state_dict(keep_vars=True)
            computed = [buffer for buffer, _ in held.named_buffers(recurse=False) if buffer not in saved]
            if not computed:
                continue
            module.to_empty(device="cpu", recurse=False)
            owner._init_weights(module)
            for buffer in computed:
                old, new = held.get_buffer(buffer), module.get_buffer(buffer)
                if not torch.equal(new.to(old.dtype), old):
                    raise UsageError(
                        f"model type {model.config.model_type}: {name}.{buffer} cannot be computed apart from its "
                        "weights, which reading them in parts needs; set strategy: ddp or zero2"
                    )
                setattr(held, buffer, new)


def num_shown(config: object) -> int:
    """How many first layers hold every kind of layer, at least two where there are so many."""
    kinds = getattr(config, "layer_types", None) or []
    firsts = [kinds.index(kind) for kind in set(kinds)]
    return min(max([1, *firsts]) + 1, int(getattr(config, "num_hidden_layers")))  # noqa: B009  (configs are untyped)


@torch.no_grad()
def _replace(model: nn.Module, make: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Put what `make` gives in every parameter's place, a tied one once; returns the old ones by name."""
    old: dict[str, Tensor] = {}
    new: dict[Tensor, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        old[name] = parameter
        if parameter not in new:
            made = make(name, parameter.detach())
            if not isinstance(made, nn.Parameter):
                made = nn.Parameter(made, requires_grad=parameter.requires_grad)
            new[parameter] = made
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, new[parameter])
    return old
