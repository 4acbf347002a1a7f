"""Regional compilation: each decoder layer is one graph, compiled once for all layers, dynamic in tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from threading import Thread
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from flatout.config.model import CompileMode
from flatout.errors import first_line
from flatout.models.blocks import decoder_layers, hidden_states
from flatout.models.compile.regions import (
    Forward,
    LayerCall,
    Regions,
    autocast_of,
    compare_with_eager,
    ends_of_kinds,
    gradients,
    record_calls,
)
from flatout.models.context.shard import ContextShard
from flatout.models.experts.block import computes_experts
from flatout.models.load.model import LoadedModel
from flatout.models.lora.layer import lora_layers, trainable_parameters
from flatout.models.model_with_loss import ModelWithLoss
from flatout.models.packed import PackedBatch
from flatout.models.probe import has_experts, random_batch

# two sizes, so that the graph is dynamic in tokens and documents before the first step
_WARM_UP_LENGTHS = ((200, 31, 150), (700, 300, 129, 16, 5))
# tokens of a large batch: multiples of 128, to which batches are padded, but of no larger power of two (`_row_length`)
_LARGE_TOKENS = (8064, 4480, 2432)
_Gather: TypeAlias = Callable[[Any], Sequence[Any]]
# a difference in the last bit before quantizing can move a value by 1/16: a correct layer has shown 0.9895
_SMALLEST_FP8_COSINE = 0.97
_SMALLEST_COSINE = {torch.bfloat16: 0.99, torch.float16: 0.99, torch.float32: 0.99999}


def import_compiler() -> Thread:
    """Import the compiler and start its workers on a thread, while weights are loaded.

    It compiles nothing: compiling saves and restores global state, such as the random state and `nn.Module.__call__`,
    which would race with the loading thread.
    """

    def import_it() -> None:
        # compiling the layers will raise and report the same error
        with suppress(Exception):
            for name in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx"):
                import_module(name)
            from torch._inductor.async_compile import maybe_warm_pool

            maybe_warm_pool()

    thread = Thread(target=import_it, name="flatout-compiler", daemon=True)
    thread.start()
    return thread


@contextmanager
def report_compilations(log: Callable[[float], None]) -> Iterator[None]:
    """Call `log` with the seconds of each compilation in this context; there should be none while steps run."""
    from torch._dynamo.callback import callback_handler

    started_s: list[float] = []

    def start(_: object) -> None:
        started_s.append(time.perf_counter())

    def end(_: object) -> None:
        if started_s:  # empty if another thread's compilation started before this context
            log(time.perf_counter() - started_s.pop())

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


@dataclass(frozen=True, slots=True)
class CompileOutcome:
    """How many decoder layers run compiled, why the others do not, and how close compiled gradients are to eager.

    `num_split` of the compiled ones are several graphs, for `split_reason`.
    """

    num_compiled: int
    num_layers: int
    reason: str | None = None
    smallest_cosine: float = 1.0
    num_split: int = 0
    split_reason: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every layer is one graph."""
        return self.num_compiled == self.num_layers and not self.num_split

    @property
    def line(self) -> str:
        if not self.num_compiled:
            return f"off: {self.reason}"
        proof = f"gradients equal eager ones (smallest cosine {self.smallest_cosine:.6f})"
        if self.is_complete:
            return f"{self.num_layers} layers as one graph; {proof}"
        parts = [f"{self.num_compiled} of {self.num_layers} layers; {proof}"]
        if self.num_split:
            parts.append(f"{self.num_split} are several graphs: {self.split_reason}")
        if num_eager := self.num_layers - self.num_compiled:
            parts.append(f"{num_eager} run eagerly: {self.reason}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What compiled layers must be ready for, and how they are compared with eager ones.

    `num_boundaries` is that of every batch of the run (`padded_num_boundaries`); None on the CPU. So is
    `num_shared_boundaries`, in a run that shares prefixes. With `shard`, batches are shards of micro-batches. `fp8`
    means that products are in float8, and `has_pictures` that the run's data has pictures. `gather` returns a value of
    every rank.
    """

    num_boundaries: int | None
    num_shared_boundaries: int | None = None
    shard: ContextShard | None = None
    largest_pass_tokens: int = 0
    fp8: bool = False
    has_pictures: bool = False
    gather: _Gather = lambda value: (value,)

    def batch(self, loaded: LoadedModel, lengths: Sequence[int]) -> PackedBatch:
        """Return random documents of these lengths, as the run's batches are."""
        batch = random_batch(
            loaded.model,
            lengths,
            num_boundaries=self.num_boundaries,
            num_shared_boundaries=self.num_shared_boundaries,
            shard=self.shard,
            row_length=_row_length(lengths) if loaded.is_padded else None,
        )
        return replace(batch, pictures={}) if self.has_pictures else batch


def compile_layers(
    loaded: LoadedModel,
    mode: CompileMode,
    options: CompileOptions,
    loss: Forward | None = None,
    wrapper: Forward | None = None,
) -> CompileOutcome:
    """Compile every decoder layer, compare each with eager on small batches, and warm up the whole model.

    `loss` must be sharded already, as sharding changes a layer's class and the dtype of its weights. `wrapper` is what
    training calls, if not `loss`: one pass without gradients records how it calls the layers. All ranks call this.
    The compiler picks block sizes on a kernel's first call, so the first and last layer of each kind run one large
    batch before the others, of at most half of the run's largest pass. A shard has none, as it could be as long as a
    layer is wide (`_row_length`).
    Off on the CPU, in fp64 and for transformers' own experts. A layer whose gradients differ runs eagerly. A kind of
    layers that is not one graph is split around kernels that exclude themselves from compilation, or else runs eagerly.
    With dropout, layers are compared without it, and both graphs are compiled. Nothing of the model changes.
    """
    model = loaded.model
    if (why := _reason_against(loaded, mode)) is not None:
        return CompileOutcome(0, len(decoder_layers(model)), why)
    assert options.num_boundaries is not None
    was_training = model.training
    large = _large_lengths(loaded, options.largest_pass_tokens) if options.shard is None else []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _compiler_settings():
        smallest = _SMALLEST_FP8_COSINE if options.fp8 else _SMALLEST_COSINE[loaded.dtype]
        loss = loss or ModelWithLoss(loaded.model)
        outcome = _compile(loaded, options, smallest, loss, wrapper or loss, large)
    model.train(was_training)
    return outcome


def _compile(
    loaded: LoadedModel,
    options: CompileOptions,
    smallest_cosine: float,
    loss: Forward,
    wrapper: Forward,
    large_lengths: Sequence[int] = (),
) -> CompileOutcome:
    # importing the compiler takes a second, and only runs on a GPU need it
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    model = loaded.model
    regions = Regions(model)
    layers = regions.layers
    # read here, as a sharded layer has other parameters during a pass
    trained = {layer: list(trainable_parameters(layer).values()) for layer in layers}
    all_trained = list(trainable_parameters(model).values())
    # a single row has a graph of its own, which must be dynamic as well
    warm_up = [*_WARM_UP_LENGTHS, *(lengths[:1] for lengths in _WARM_UP_LENGTHS if loaded.is_padded)]

    batches = [options.batch(loaded, lengths) for lengths in warm_up]
    large = [options.batch(loaded, large_lengths)] if large_lengths else []
    # graphs are specific to train or eval mode; without dropout both compute the same, so compare train mode's graph
    has_dropout = _has_dropout(model)
    model.train(not has_dropout)
    # the first layer's input must require a gradient like the others', or it would need another graph
    model.enable_input_require_grads()
    ends = ends_of_kinds(layers, model)
    calls = [call for batch in large for call in record_calls(loaded, ends, batch, wrapper)]
    calls += [call for batch in batches for call in record_calls(loaded, layers, batch, wrapper)]
    regions.compile()
    cosines = _compare(loaded, trained, calls, smallest_cosine, regions, options.gather)
    model.train()
    try:
        # with dropout, this compiles another graph
        for batch in [*(large if has_dropout else []), *batches]:
            with autocast_of(loaded, calls[0][-1]):
                loss_sum, *_ = loss(batch)
            gradients(loss_sum, all_trained, None)
            # passes that an auxiliary loss needs before gradients are another graph
            if isinstance(loss, ModelWithLoss) and loss.aux_loss.needs_passes(2):
                with torch.no_grad(), autocast_of(loaded, calls[0][-1]):
                    hidden_states(model, batch)
                loss.aux_loss.end_pass()
    except (TorchDynamoException, InductorError) as error:
        regions.run_eagerly(layers, f"the layers do not compile for training ({first_line(error)})")
    eager, split = regions.eager, regions.split
    least = min((cosine for layer, cosine in cosines.items() if layer not in eager), default=1.0)
    reason, split_reason = ("; ".join(dict.fromkeys(reasons.values())) or None for reasons in (eager, split))
    return CompileOutcome(len(layers) - len(eager), len(layers), reason, least, len(split), split_reason)


def _has_dropout(model: PreTrainedModel) -> bool:
    rates = [getattr(model.config.get_text_config(), "attention_dropout", 0.0)]
    rates += [layer.dropout for layer in lora_layers(model).values()]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(rates)


def _compare(
    loaded: LoadedModel,
    trained: Mapping[nn.Module, list[nn.Parameter]],
    calls: Iterable[LayerCall],
    smallest_cosine: float,
    regions: Regions,
    gather: _Gather,
) -> dict[nn.Module, float]:
    """Return the smallest cosine of each layer that was compared; `regions` learns which do not compile or differ.

    A layer that does not compile has none. Ranks decide together, since layers may exchange tensors with other ranks.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    cosines: dict[nn.Module, float] = {}
    for call in calls:
        layer = call[0]
        # once more after a layer was split
        while layer not in regions.eager:
            broken = differs = None
            try:
                cosine, what = compare_with_eager(loaded, trained[layer], call)
                cosines[layer] = min(cosine, cosines.get(layer, 1.0))
                if not cosine >= smallest_cosine:
                    where = f"{what} of layer {regions.layers.index(layer)}"
                    differs = f"{where} differs compiled from eager (cosine {cosine:.6f})"
            except (TorchDynamoException, InductorError) as error:
                broken = f"{type(layer).__name__} is not one graph ({first_line(error)})"
            every_broken, every_differs = zip(*gather((broken, differs)), strict=True)
            if why := next(filter(None, every_broken), None):
                # all of its kind, as trying each of them would take minutes
                regions.fall_back(layer, why)
                continue
            if why := next(filter(None, every_differs), None):
                regions.run_eagerly([layer], why)
            break
    return cosines


def _large_lengths(loaded: LoadedModel, largest_pass_tokens: int) -> list[int]:
    """Return document lengths for the largest of `_LARGE_TOKENS` that fits; empty if none does.

    It takes at most half of the largest pass, as eager layers need more memory than compiled ones. No layer may have
    its length as a width, nor the length without the 128 tokens that a shared prefix saves.
    """
    layers = decoder_layers(loaded.model)
    tensors = (tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    widths = {size for tensor in tensors for size in tensor.shape}
    fitting = (size for size in _LARGE_TOKENS if 2 * size <= largest_pass_tokens)
    num_tokens = next((size for size in fitting if widths.isdisjoint((size, size - 128))), 0)
    if loaded.is_padded:
        return [500] * (num_tokens // _row_length([500]))
    return [min(500, num_tokens - start) for start in range(0, num_tokens, 500)]


def _row_length(lengths: Sequence[int]) -> int:
    """Return the length of a warm-up's rows: a multiple of 16, which float8 needs, but of no larger power of two.

    Widths of models are. The compiler would take a length that equals one for the same number, and compile again.
    """
    return max(lengths) // 32 * 32 + 48


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Set the compiler's options while layers are compiled.

    Gradients of norms' weights are always summed over tokens by the fused kernel: the compiler would choose by the
    number of tokens, and recompile above each threshold, as it would if it padded products. Floats such as a norm's
    epsilon are constants, as inputs would cost host-side kernels. Layers with our autograd functions are cached: both
    passes are part of the key. Where transformers recomputes inside a layer's graph, what the forward pass keeps in
    attributes is not kept again. The compiled code does not repeat the guards' checks of sizes.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    caching = "autograd_cache_allow_custom_autograd_functions"
    changes = {caching: True} if hasattr(functorch_config, caching) else {}
    fusing = "mix_order_reduction_non_strict_mode"
    kernels = {"shape_padding": False, "size_asserts": False}
    kernels |= {f"triton.{fusing}": True} if hasattr(inductor_config.triton, fusing) else {}
    tracing = {"specialize_float": True, "skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    with dynamo_config.patch(tracing), functorch_config.patch(changes), inductor_config.patch(kernels):
        yield


def _reason_against(loaded: LoadedModel, mode: CompileMode) -> str | None:
    if mode == "off":
        return "as configured"
    if loaded.model.device.type != "cuda":
        return "only on CUDA"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic runs cannot use autotuned kernels"
    if loaded.dtype not in _SMALLEST_COSINE:
        return f"not in {loaded.dtype}"
    if has_experts(loaded.model) and not computes_experts(loaded.model):
        return "this model's expert routing is not a static graph"
    if loaded.attention in ("sdpa", "plain"):
        return f"attention {loaded.attention} reads document boundaries on the host"
    return None
