"""State sharded by DeepSpeed (ZeRO stages 1 to 3), with the settings in a user's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.config.deepspeed import fill, stage_of
from flatout.errors import Fix, UsageError, needs_extra
from flatout.parallel.strategies.protocol import Strategy, oom_as_resource_error

STEP = "step"


class DeepSpeed(Strategy):
    """DeepSpeed's engine with the user's JSON completed; raises UsageError for a JSON that contradicts a setting.

    It sums gradients in the backward pass, keeps them internally and clips them in its step, by the same formula
    and limit as flatout, so `grad` of the parameters is not set. It averages over ranks, so the loss's gradient is
    multiplied by the number of ranks. All ranks must run the same number of micro-batches; none may skip or retry one.
    """

    _engine: Any = None

    def check_settings(self) -> None:
        precision = "bf16" if self._dtype == torch.bfloat16 else "fp32"
        try:
            self._settings = fill(self._config, num_ranks=self.rank.world, precision=precision)
        except ValueError as error:
            raise UsageError(f"deepspeed: {error}") from error

    def prepare(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        with needs_extra("strategy: deepspeed", "deepspeed", Fix({"strategy": "zero3"})):
            import deepspeed
        # DeepSpeed leaves buffers as they are: its stage 3 would gather frozen one-byte parameters (codes of quantized
        # weights), and gloo does not support float8
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.itemsize == 1:
                    delattr(module, name)
                    module.register_buffer(name, parameter.detach(), persistent=False)
            if getattr(module, "reads_submodules", False):
                # stage 3 gathers weights where a module is called: all of them here, as some are only read
                deepspeed.utils.set_z3_leaf_module(module, True)
        if stage_of(self._settings) == 3:
            # it takes a leaf module's gradients once its input has one; in a first layer, only if embeddings get one
            inner: Any = model.model
            inner.enable_input_require_grads()
        optimizer = make_optimizer()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings, dist_init_required=False
        )
        self.engine_state = partitioned = PartitionedOptimizer(self._engine, optimizer, self._trained)
        return EngineLoss(self._engine, model, self.rank.world), partitioned

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        # stage 3 empties a weight and keeps its shape in `ds_shape`
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        with oom_as_resource_error(self.rank):
            yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    @torch.no_grad()
    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        from deepspeed import utils

        is_stage_3 = self._engine.zero_optimization_stage() == 3
        if not is_stage_3 and hasattr(self._engine.optimizer, "scaled_global_norm"):
            norm = torch.as_tensor(self._engine.optimizer.scaled_global_norm(), device=self._device)
            # DeepSpeed reports a non-finite norm as -1
            return torch.where(norm < 0, torch.nan, norm)
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for grad in map(utils.safe_get_local_grad if is_stage_3 else utils.safe_get_full_grad, self._trained):
            if grad is not None:
                square += torch.linalg.vector_norm(grad.to(self._device), dtype=torch.float32).double().square()
        if is_stage_3:
            dist.all_reduce(square)
        return square.sqrt().float()


class EngineLoss(nn.Module):
    """The loss from DeepSpeed's engine; its gradient is multiplied by the number of ranks to undo the average."""

    # an attribute of ModelWithLoss; None: no CUDA graphs
    decoder = None

    def __init__(self, engine: nn.Module, model: Any, num_ranks: int) -> None:
        super().__init__()
        self.engine, self._num_ranks = engine, num_ranks
        # in a tuple, as the engine holds its weights
        self._models = (model,)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return what ModelWithLoss does."""
        sums: tuple[Tensor, ...] = self.engine(*inputs)
        if sums[0].requires_grad:
            sums[0].register_hook(lambda grad: grad * self._num_ranks)
        return sums

    @property
    def on_losses(self) -> Any:
        return self._models[0].on_losses

    @on_losses.setter
    def on_losses(self, reader: Any) -> None:
        self._models[0].on_losses = reader


class PartitionedOptimizer(Optimizer):
    """`inner` stepped by DeepSpeed's engine, with groups of settings but no parameters.

    It is the strategy's `EngineState`: the engine keeps partitioned weights and state outside the model's parameters.
    """

    def __init__(self, engine: Any, inner: Optimizer, trained: Sequence[nn.Parameter]) -> None:
        # does not call Optimizer.__init__, which requires parameters and would wrap `step` a second time
        self._engine, self._inner, self._trained = engine, inner, trained
        self.defaults, self.state = inner.defaults, inner.state
        self.param_groups = [{**group, "params": []} for group in inner.param_groups]
        self._has_stepped = False
        self._make_moments()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad(set_to_none=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        self._engine.step()
        self._has_stepped = True

    def weight(self, tensor: Tensor) -> Tensor:
        from deepspeed import utils, zero

        if tensor.requires_grad:
            master: Tensor = utils.safe_get_full_fp32_param(tensor)
            return master.detach()
        if not hasattr(tensor, "ds_id"):
            return tensor.detach()
        with zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        from deepspeed import utils

        tensors: Mapping[str, Any] = next(iter(self.state.values())) if self._has_stepped else {}
        return {
            # `step` is the same for all weights; moments are sharded like their weight
            key: value.clone() if key == STEP else utils.safe_get_full_optimizer_state(parameter, key)
            for key, value in tensors.items()
            if value is not None
        }

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed import zero

        value = value.to(self._engine.device)
        self._put(parameter, value, None)
        if hasattr(parameter, "ds_id"):
            with zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        else:
            parameter.data.copy_(value)

    @torch.no_grad()
    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if not self._has_stepped:
            self._take_empty_step()
        if key == STEP:
            for tensors in self.state.values():
                tensors[STEP].copy_(value)
        else:
            self._put(parameter, value, key)

    def _put(self, parameter: Any, value: Tensor, key: str | None) -> None:
        """Set this rank's shard from a whole weight (key None) or moment."""
        from deepspeed import utils

        names = () if key is None else (key,)
        if not hasattr(parameter, "ds_id"):
            put = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
            put(parameter, value, *names)
            return
        # pad the last shard with zeros, which DeepSpeed's function for whole values does not do
        size, flat = parameter.ds_tensor.numel(), value.flatten()
        flat = F.pad(flat, (0, size * dist.get_world_size() - flat.numel()))
        put = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        put(parameter, flat[size * dist.get_rank() :][:size], *names)

    @torch.no_grad()
    def _make_moments(self) -> None:
        """Create the moments by an update with zero gradients and zero learning rate, which changes no weight."""
        # stages 1 and 2 map all groups' moments to weights after the first group's first step: they must exist by then
        rates = [(group, group["lr"]) for group in self._inner.param_groups]
        parts = [(part, part.grad) for group, _ in rates for part in group["params"]]
        if not parts:
            return
        for group, _ in rates:
            group["lr"] = 0.0
        for part, _ in parts:
            part.grad = torch.zeros_like(part)
        self._inner.step()
        for part, grad in parts:
            part.grad = grad
            if STEP in self.state[part]:
                self.state[part][STEP].zero_()
        for group, rate in rates:
            group["lr"] = rate

    @torch.enable_grad()
    def _take_empty_step(self) -> None:
        """Take a step with zero gradients and zero learning rate: DeepSpeed exposes moments only after a first step."""
        from deepspeed import zero

        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        self._engine.set_gradient_accumulation_boundary(True)
        with zero.GatheredParameters(list(self._trained)):
            loss = torch.stack([(parameter * 0).sum() for parameter in self._trained]).sum()
            self._engine.backward(loss)
        self.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
