"""The repeated blocks of a decoder, the unit that is compiled, sharded and checkpointed; and swapping a module."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from flatout.errors import UsageError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, first to last.

    Found as the module list as long as the config's `num_hidden_layers`. Raises UsageError when there is none.
    """
    decoder = model.get_decoder()
    num_layers = model.config.get_text_config().num_hidden_layers
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return list(child)
    raise UsageError(
        f"model type {model.config.model_type} has no list of {num_layers} decoder layers; choose another model"
    )


def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in place of the one that `root` knows by this dotted name."""
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)
