"""A model's decoder: its layers (the unit of compilation and sharding) and its last hidden states."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.errors import UsageError
from flatout.models.arch_quirks import MAMBA2, packed_hybrid, picture_kinds
from flatout.models.packed import PackedBatch
from flatout.models.slot_cache import SlotCache

# the names of transformers' own attention, from the fastest to the most general
TRANSFORMERS_ATTENTION = ("sdpa", "eager")
# the parts of a model that make tokens of pictures, as in `model.freeze_vision_tower`; names of the second
PARTS = ("vision_tower", "projector")
_PROJECTOR = re.compile("projector|merger|connector|embed_vision|visual_embeddings_table|image_newline")
# parts that do not read text
_TOWER = re.compile("vision|visual|image|audio")
# the argument by which a model of transformers' takes features that were computed before
FEATURES = "mm_encoder_outputs"
# the answers of `_transforms_states` and `trains_tower`: walking all parameters in every pass would take milliseconds
_TRANSFORMING: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_TRAINING_TOWER: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def layer_list(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """Return the decoder, from tokens to last hidden states, and the name of its list of layers.

    The list is the first ModuleList of `num_hidden_layers` modules, or if there is none, the one with most parameters;
    the decoder is the innermost model that contains it. Raises UsageError for encoder-decoders and without a list.
    """
    if model.config.is_encoder_decoder:
        raise UsageError(
            f"model type {model.config.model_type} is an encoder-decoder; choose a model that only has a decoder"
        )
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    decoder = model.get_decoder()
    for root in (decoder, model):
        for name, module in root.named_modules():
            is_list = isinstance(module, nn.ModuleList) and len(module) == num_layers
            if is_list and not _TOWER.search(name) and (inner := _inside(model, module)):
                return inner
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()), default=None)
    if largest is not None and (inner := _inside(model, largest)):
        return inner
    raise UsageError(f"model type {model.config.model_type} has no list of decoder layers; choose a different model")


def _inside(model: PreTrainedModel, layers: nn.Module) -> tuple[PreTrainedModel, str] | None:
    """Return the innermost model below `model` that contains a list of layers, and the list's name in it."""
    path = next(name for name, module in model.named_modules() if module is layers)
    parts = path.split(".")
    for start in reversed(range(1, len(parts))):
        decoder = model.get_submodule(".".join(parts[:start]))
        if isinstance(decoder, PreTrainedModel):
            return decoder, ".".join(parts[start:])
    return None


def expert_tensors(layer: nn.Module) -> list[nn.Parameter]:
    """Return the 3-D parameters (experts, ...) of a layer, in which transformers keeps all experts' matrices."""
    owners = (module for module in layer.modules() if "Expert" in type(module).__name__)
    return [tensor for owner in owners for tensor in owner.parameters(recurse=False) if tensor.ndim == 3]


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model from tokens to last hidden states. Raises like `layer_list`."""
    return layer_list(model)[0]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers, first to last. Raises like `layer_list`."""
    decoder, name = layer_list(model)
    return list(decoder.get_submodule(name).children())


def towers(model: PreTrainedModel, trained: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters that text never uses, such as a vision tower's, by name. Raises like `layer_list`.

    Those of the `trained` ones of PARTS are left out.
    """
    if model.config.get_text_config() is model.config:
        return {}
    head = model.get_output_embeddings()
    used = {*text_decoder(model).parameters(), *(head.parameters() if head is not None else ())}
    unread = {name: parameter for name, parameter in model.named_parameters() if parameter not in used}
    return {name: parameter for name, parameter in unread.items() if part_of(name) not in trained}


def trains_tower(model: PreTrainedModel) -> bool:
    """Whether anything that reads pictures is trained; looked up in a model's first pass with gradients."""
    if model not in _TRAINING_TOWER:
        _TRAINING_TOWER[model] = any(parameter.requires_grad for parameter in towers(model).values())
    return _TRAINING_TOWER[model]


def trained_towers(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models inside a model that read pictures, are trained, and can compute their layers again."""
    trained = {parameter for parameter in towers(model).values() if parameter.requires_grad}
    read = text_decoder(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and read not in part.modules()]
    return [part for part in parts if part.supports_gradient_checkpointing and trained & set(part.parameters())]


def part_of(name: str) -> str:
    """Return which of PARTS a parameter outside the decoder of texts belongs to; "" for what reads sounds."""
    return "" if "audio" in name else PARTS[1] if _PROJECTOR.search(name) else PARTS[0]


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Return a batch's last hidden states (T, D), each document on its own; `model` is from load_model."""
    inputs, rows = model_inputs(model, batch)
    states = last_states(model, inputs, with_pictures=batch.pictures is not None).flatten(0, 1)
    return states if rows is None else states.index_select(0, rows)


def last_states(model: PreTrainedModel, inputs: dict[str, Any], *, with_pictures: bool = False) -> torch.Tensor:
    """Return what a model's head reads, (B, S, D), for these keyword arguments.

    `with_pictures` takes all that is around the decoder of texts, which puts features of pictures in their places.
    """
    head = model.get_output_embeddings()
    if head is None or not _transforms_states(model):
        reader = model.base_model if with_pictures else text_decoder(model)
        with _own_features(reader, inputs) as arguments:
            states: torch.Tensor = reader(**{"use_cache": False, **arguments}).last_hidden_state
        return states
    name = next(name for name, module in model.named_modules() if module is head)
    with replaced_modules(model, {name: nn.Identity()}):
        return model(**{"use_cache": False, **inputs}).logits


@contextmanager
def _own_features(reader: PreTrainedModel, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs as a model takes them that has no argument for features computed before.

    Before transformers 5.20 models compute them from `pixel_values`, by a method that then gives ours.
    """
    if FEATURES not in inputs or FEATURES in inspect.signature(reader.forward).parameters:
        yield inputs
        return
    rest = {name: value for name, value in inputs.items() if name != FEATURES}
    features = inputs[FEATURES]["image"]
    reader.get_image_features = lambda *_, **__: features
    try:
        yield {**rest, "pixel_values": torch.empty(1)}
    finally:
        del reader.get_image_features


def _transforms_states(model: PreTrainedModel) -> bool:
    """Whether a text model has parameters between decoder and head, as BERT does; looked up once for each model."""
    if model not in _TRANSFORMING:
        is_text = model.config.get_text_config() is model.config
        ends = (text_decoder(model), model.get_output_embeddings())
        known = {id(parameter) for end in ends for parameter in end.parameters()}
        _TRANSFORMING[model] = is_text and any(id(parameter) not in known for parameter in model.parameters())
    return _TRANSFORMING[model]


def model_inputs(model: PreTrainedModel, batch: PackedBatch) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return a batch as keyword arguments of a transformers model, and which rows of its output are the batch's.

    None: all. transformers' own attention gets rows without a mask, as causal layers never read padding on the right.
    """
    config = model.config.get_text_config()
    token_ids = batch.token_ids.view(batch.shape)
    cache = {} if batch.cache is None else {cache_argument(model): batch.cache, "use_cache": True}
    if batch.row_length is not None and config._attn_implementation in TRANSFORMERS_ATTENTION:
        return {"input_ids": token_ids, **cache, **picture_arguments(model, batch)}, None
    rows = None
    # without a mask, transformers searches the positions for documents, which synchronizes with the GPU; it makes no
    # mask when it gets one of four dimensions
    mask = torch.ones_like(token_ids, dtype=torch.bool) if batch.row_length is None else torch.empty(1, 1, 1, 0)
    gap, packages = packed_hybrid(config)
    if gap and batch.row_length is None:
        batch, rows = batch.spread(gap)
        token_ids = batch.token_ids[None]
        mask = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(1, rows, True)
    positions = batch.position_ids.view(batch.shape)
    arguments = {"input_ids": token_ids, "position_ids": positions, "attention_mask": mask, **document_arguments(batch)}
    arguments |= cache | picture_arguments(model, batch)
    if packages == MAMBA2 and batch.row_length is None:
        arguments["seq_idx"] = batch.document_numbers.int()[None]
    return arguments, rows


def picture_arguments(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Any]:
    """Return a batch's pictures as the keyword arguments of a transformers model.

    One call of the tower computes the features of all pictures; a frozen one leaves no graph.
    """
    arguments: dict[str, Any] = {}
    if batch.axes is not None:  # positions in the text come first, and tell documents apart
        positions = torch.cat([batch.position_ids[None], batch.axes])
        arguments["position_ids"] = positions.view(4, *batch.token_ids.view(batch.shape).shape)
    if batch.pictures:
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_tower(model)):
            arguments[FEATURES] = {"image": image_features(model, batch.pictures)}
    if batch.pictures is not None and (kinds := picture_kinds(model.config.get_text_config())):
        arguments[kinds] = batch.token_ids.eq(picture_token(model)).int().view(batch.shape)
    return arguments


def picture_token(model: PreTrainedModel) -> int:
    """Return the token that a model puts the features of pictures in place of; -1 if its config names none."""
    return int(getattr(model.config, "image_token_id", getattr(model.config, "image_token_index", -1)))


def image_features(model: PreTrainedModel, pictures: Mapping[str, torch.Tensor]) -> Any:
    """Return what a model's tower and projector make of pictures."""
    return model.base_model.get_image_features(**pictures, return_dict=True)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the argument by which a model's decoder takes a cache. Raises ValueError if it takes none."""
    parameters = inspect.signature(text_decoder(model).forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise ValueError("the model keeps no cache of keys and values")


def computed_batch(model: PreTrainedModel, batch: PackedBatch) -> PackedBatch:
    """Return a batch with the tokens that the model computes for it: a hybrid's has more between its documents."""
    gap, _ = packed_hybrid(model.config.get_text_config())
    return batch.spread(gap)[0] if gap and batch.row_length is None else batch


def sample_counts(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Return how many samples have each token that the model computes for a batch, int64; 0 for all padding."""
    return computed_batch(model, batch).sample_counts


def document_arguments(batch: PackedBatch) -> dict[str, Any]:
    """Return the documents' boundaries as the keyword arguments that transformers passes to every attention layer.

    Rows have names of our own: by those of transformers, a layer with a state would take them for one packed row.
    """
    if batch.row_length is not None:
        return {"row_cu_seqlens": batch.cu_seqlens, "max_row_length": batch.max_seqlen}
    arguments: dict[str, Any] = {"cu_seq_lens_q": batch.cu_seqlens, "max_length_q": batch.max_seqlen}
    if batch.shared is not None:
        arguments["shared_prefixes"] = batch.shared
    if batch.keys is not None:
        arguments["context_keys"] = batch.keys
    if isinstance(batch.cache, SlotCache) and batch.cache.reads is not None:
        arguments["slot_reads"] = batch.cache.reads
    # kernels for the delta rule then count their chunks without waiting for the GPU
    return arguments if batch.cu_seqlens_cpu is None else {**arguments, "cu_seqlens_cpu": batch.cu_seqlens_cpu}


def layer_configs(config: Any) -> list[Any]:
    """Return one config per layer if attributes such as the head size differ by layer, otherwise a single one."""
    differs = getattr(config, "is_heterogeneous", False)
    return [config.per_layer_config[index] for index in range(config.num_hidden_layers)] if differs else [config]


def attention_of_parts(model: PreTrainedModel) -> dict[str, str]:
    """Return the attention of a model and of each of its parts, for its `set_attn_implementation`."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    top = config if parts else config.get_text_config()
    return {"": top._attn_implementation} | {name: part._attn_implementation for name, part in parts.items()}


def replace_module(root: nn.Module, name: str, module: nn.Module | torch.Tensor) -> None:
    """Replace the submodule, parameter or buffer of `root` with this dotted name by `module`."""
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


@contextmanager
def replaced_modules(root: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace submodules of `root` by `modules`, by dotted name, in this context."""
    replaced = {name: root.get_submodule(name) for name in modules}
    for name, module in modules.items():
        replace_module(root, name, module)
    try:
        yield
    finally:
        for name, module in replaced.items():
            replace_module(root, name, module)
