"""Regional compilation: each decoder layer as one graph, one compile for all layers, dynamic in tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from flatout.models.blocks import decoder_layers
from flatout.models.head import PackedLoss
from flatout.models.load import LoadedModel
from flatout.models.lora import lora_layers, trainable_parameters
from flatout.models.packed import PackedBatch, pack
from flatout.models.selftest import has_experts

# two sizes, so that the graph is dynamic in tokens and documents before the first step
_WARM_UP_LENGTHS = ((200, 31, 150), (700, 300, 129, 16, 5))
# a layer, its arguments, and whether autocast was on around it: a strategy may turn it off
_LayerCall: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any], bool]
_Forward: TypeAlias = Callable[[PackedBatch], tuple[torch.Tensor, torch.Tensor]]
# a last bit of difference before quantising moves a value by a whole step of 1/16: 0.9895 seen on a sound layer
_SMALLEST_FP8_COSINE = 0.97
_SMALLEST_COSINE = {torch.bfloat16: 0.99, torch.float16: 0.99, torch.float32: 0.99999}


def import_compiler() -> Thread:
    """Import the compiler and start its workers on a thread, while weights are read.

    It compiles nothing: whatever does so puts back the random state, the default dtype and more that it found, for
    every thread, and while it traces patterns `nn.Module.__call__` is torch.fx's.
    """

    def import_it() -> None:
        # an error is not lost: the layers meet it again, where it is told
        with suppress(Exception):
            for name in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx"):
                import_module(name)
            from torch._inductor.async_compile import maybe_warm_pool

            maybe_warm_pool()

    thread = Thread(target=import_it, name="flatout-compiler", daemon=True)
    thread.start()
    return thread


@contextmanager
def report_compilations(tell: Callable[[float], None]) -> Iterator[None]:
    """Within, `tell` hears the seconds of everything that is compiled: where steps run, nothing should be."""
    from torch._dynamo.callback import callback_handler

    started_s: list[float] = []

    def start(_: object) -> None:
        started_s.append(time.perf_counter())

    def end(_: object) -> None:
        if started_s:  # another thread of the user's may have begun earlier
            tell(time.perf_counter() - started_s.pop())

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def compile_layers(
    loaded: LoadedModel,
    mode: Literal["auto", "off"],
    *,
    num_borders: int | None,
    fp8: bool = False,
    loss: _Forward | None = None,
    wrapper: _Forward | None = None,
) -> str:
    """Compile every decoder layer, prove each against eager on two small batches, and warm the whole model up.

    `num_borders` is what every batch of the run will have (`kernel_borders`); None on the CPU. `fp8` says that products
    are in float8. `loss` is the one that a strategy has changed: cutting changes a layer's class and the dtype of its
    weights, so what was compiled before would be compiled again. `wrapper` is what training calls, where that is
    another; it is asked how it calls the layers, without gradients. All ranks must call this alike. Returns a line for
    the console: what was done, or why nothing was. Off on the CPU, in fp64 and for experts, whose routing is no static
    graph. A model whose layers cannot be compiled, or give other gradients, runs eagerly, and the line says so. With
    dropout the comparison is made without it, and the graph with it is compiled as well, so that no step compiles
    anything. Random state, gradients, weights and mode are left as found.
    """
    model = loaded.model
    if (why := _reason_against(loaded, mode)) is not None:
        return f"off: {why}"
    assert num_borders is not None
    was_training = model.training
    with torch.random.fork_rng(devices=[model.device]):
        smallest = _SMALLEST_FP8_COSINE if fp8 else _SMALLEST_COSINE[loaded.dtype]
        loss = loss or PackedLoss(loaded.model)
        line = _compile(loaded, num_borders, smallest, loss, wrapper or loss)
    model.train(was_training)
    return line


def _compile(loaded: LoadedModel, num_borders: int, smallest_cosine: float, loss: _Forward, wrapper: _Forward) -> str:
    # importing the compiler takes a second, and only runs on a GPU need it
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    model = loaded.model
    layers = decoder_layers(model)
    # as they lie between steps: in its passes a cut layer has others
    trained = {layer: list(trainable_parameters(layer).values()) for layer in layers}
    every = list(trainable_parameters(model).values())
    batches = [_batch(model, lengths, num_borders) for lengths in _WARM_UP_LENGTHS]
    # a graph belongs to a mode; without dropout both compute the same, so training's own is the one compared
    model.train(not _has_dropout(model))
    # the first layer's input needs a gradient like the others', or it would be a graph of its own
    model.enable_input_require_grads()
    calls = [call for batch in batches for call in _layer_calls(loaded, layers, batch, wrapper)]
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True)
    try:
        with _compiler_settings():
            cosine = min(_layer_cosine(loaded, trained[call[0]], *call) for call in calls)
            model.train()
            for batch in batches:
                with _autocast(loaded, calls[0][-1]):
                    loss_sum, _ = loss(batch)
                _gradients(loss_sum, every, None)
    except (TorchDynamoException, InductorError) as error:
        torch.compiler.set_stance("force_eager")
        return f"off: this model's layers do not compile ({str(error).splitlines()[0]})"
    if cosine < smallest_cosine:
        torch.compiler.set_stance("force_eager")
        return f"off: a compiled layer's gradients differ from the eager one's (cosine {cosine:.6f})"
    return f"{len(layers)} layers as one graph; gradients equal eager ones (smallest cosine {cosine:.6f})"


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Around everything that compiles layers.

    Norms' weights sum their gradients over all tokens, by one of two kernels: by itself the compiler chooses by the
    number of tokens, and compiles again, for seconds, in a step that is the first above one of its thresholds. Told
    not to ask, it always takes the fused one. Numbers such as a norm's epsilon are constants: as inputs they cost
    kernels on the host. Traced layers are cached although they hold autograd functions of ours, since both passes of
    those are part of what the cache compares; a wrong one would fail the proof.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    caching = "autograd_cache_allow_custom_autograd_functions"
    changes = {caching: True} if hasattr(functorch_config, caching) else {}
    fusing = "mix_order_reduction_non_strict_mode"
    kernels = {f"triton.{fusing}": True} if hasattr(inductor_config.triton, fusing) else {}
    with (
        dynamo_config.patch(specialize_float=True),
        functorch_config.patch(changes),
        inductor_config.patch(kernels),
    ):
        yield


def _reason_against(loaded: LoadedModel, mode: Literal["auto", "off"]) -> str | None:
    if mode == "off":
        return "as asked"
    if loaded.model.device.type != "cuda":
        return "only on CUDA"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic runs use no kernels that are chosen by timing"
    if loaded.dtype not in _SMALLEST_COSINE:
        return f"not in {loaded.dtype}"
    if has_experts(loaded.model):
        return "expert routing is no static graph"
    if loaded.attention in ("sdpa", "plain"):
        return f"attention {loaded.attention} reads the documents' borders on the host"
    return None


def _has_dropout(model: PreTrainedModel) -> bool:
    attention = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    adapters = any(layer.dropout for layer in lora_layers(model).values())
    return bool(attention) or adapters or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


def _batch(model: PreTrainedModel, lengths: tuple[int, ...], num_borders: int) -> PackedBatch:
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    draw = np.random.default_rng(0)
    documents = [(draw.integers(0, num_embeddings, length), np.ones(length, bool)) for length in lengths]
    return pack(documents, num_borders=num_borders).to(model.device)


def _layer_calls(
    loaded: LoadedModel, layers: list[nn.Module], batch: PackedBatch, wrapper: _Forward
) -> list[_LayerCall]:
    """What every layer is called with in one forward pass of the whole model."""
    calls: list[_LayerCall] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((layer, args, kwargs, torch.is_autocast_enabled(loaded.model.device.type)))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    with torch.no_grad(), _autocast(loaded, loaded.autocast):
        wrapper(batch)
    for hook in hooks:
        hook.remove()
    return calls


def _layer_cosine(
    loaded: LoadedModel,
    trained: list[nn.Parameter],
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: bool,
) -> float:
    """The smallest cosine between the compiled layer's and the eager one's output, input gradient, trained gradients.

    One layer at a time, each on its own true input: over many layers rounding grows until it says nothing. Of a layer
    that is cut, each rank compares its part.
    """
    direction = torch.randn_like(args[0])

    def run() -> list[torch.Tensor]:
        x = args[0].detach().requires_grad_()
        with _autocast(loaded, autocast):
            result = layer(x, *args[1:], **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        x_grad, *grads = _gradients(output, [x, *trained], direction.to(output.dtype))
        assert x_grad is not None
        # together: a single tensor's gradient may be nothing but rounding
        flat = torch.cat([x_grad.new_zeros(1), *(grad.flatten().to(x.device) for grad in grads if grad is not None)])
        return [output.detach(), x_grad, flat]

    with torch.compiler.set_stance("force_eager"):
        eager = run()
    pairs = [(one.double().flatten(), other.double().flatten()) for one, other in zip(eager, run(), strict=True)]
    # an adapter starts at zero, and so does half of its gradients
    cosines = [F.cosine_similarity(one, other, dim=0).item() for one, other in pairs if one.any() or other.any()]
    return min(cosines)


def _gradients(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], direction: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Gradients of `inputs`, of cut ones this rank's part; none stays in `.grad`."""
    if not any(hasattr(tensor, "to_local") for tensor in inputs):
        return list(torch.autograd.grad(output, inputs, direction, allow_unused=True))
    # the graph knows a cut weight only as it was gathered; its own gradient comes from the strategy's hooks
    output.backward(direction)
    grads: list[torch.Tensor | None] = []
    for tensor in inputs:
        grad: Any = tensor.grad
        grads.append(grad.to_local() if hasattr(grad, "to_local") else grad)
        tensor.grad = None
    return grads


def _autocast(loaded: LoadedModel, enabled: bool) -> torch.autocast:
    return torch.autocast(loaded.model.device.type, dtype=loaded.dtype, enabled=enabled)
