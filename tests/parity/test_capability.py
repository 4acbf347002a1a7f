"""Each compute capability chooses its kernels, and the forms that an older GPU falls back to equal the reference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_samples

from flatout.config.schema import LoraConfig, ModelConfig
from flatout.environment import named_capability
from flatout.errors import UsageError
from flatout.kernels.attention import cudnn, flash
from flatout.kernels.capability import capability, choose_kernels_of
from flatout.kernels.fp8_matmul import fp8_problem, has_fp8, quantize_rows
from flatout.kernels.moe import grouped_linear, grouped_linear_fp8, reference, register_ops, route, swiglu
from flatout.models.attention import choose_attention
from flatout.models.load.model import load_model
from flatout.models.lora.layer import add_lora, trainable_parameters
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples

CUDA = torch.device("cuda", 0)
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
# GPU -> capability, has float8, what `auto` attention takes where every package is installed
GPUS = {
    "T4": ("7.5", False, "sdpa"),
    "A100": ("8.0", False, "varlen"),
    "4090": ("8.9", True, "varlen"),
    "H100": ("9.0", True, "fa4"),
    "B200": ("10.0", True, "fa4"),
}


@pytest.fixture(params=list(GPUS))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, bool, str]]:
    """Kernels are chosen as on this GPU, also by `load_model`, which reads the environment."""
    monkeypatch.setenv("FLATOUT_CAPABILITY", GPUS[request.param][0])
    choose_kernels_of(named_capability())
    yield GPUS[request.param]
    choose_kernels_of(None)


def test_the_named_capability_takes_the_place_of_the_gpus(gpu: Any) -> None:
    name, float8, _ = gpu
    assert capability(CUDA) == tuple(map(int, name.split(".")))
    assert has_fp8(CUDA) == float8
    # a CPU stays one
    assert capability(torch.device("cpu")) == (0, 0)
    assert not has_fp8(torch.device("cpu"))


def test_attention_is_the_best_that_the_capability_has(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package is installed and proves exact; only the capability decides."""
    name, _, best = gpu
    for module in (flash, cudnn):
        monkeypatch.setattr(module, "find_spec", lambda package: package)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr("flatout.models.attention._disproof", lambda *_: None)
    config = ModelShape()
    assert choose_attention("auto", config, device=CUDA, dtype=torch.bfloat16).implementation == best
    assert (flash.flash_problem(CUDA) is None) == (name in ("9.0", "10.0"))
    assert (cudnn.cudnn_problem(CUDA) is None) == (name in ("9.0", "10.0"))
    if name == "7.5":
        with pytest.raises(UsageError, match=r"varlen kernel needs an Ampere GPU \(compute capability 8\.0\) or newer"):
            choose_attention("varlen", config, device=CUDA, dtype=torch.float16)


class ModelShape:
    """What attention is chosen by."""

    hidden_size, num_attention_heads, num_key_value_heads, head_dim = 4096, 32, 8, 128


@pytest.mark.parametrize("text", ["8", "8,0", "ampere", "8.", ".9", "-8.0"])
def test_another_text_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FLATOUT_CAPABILITY", text)
    with pytest.raises(UsageError, match=r"expected a compute capability such as 8\.0"):
        named_capability()


def only_on_this_gpu(name: str) -> None:
    """Skip a newer capability than the GPU's: its kernels do not run here."""
    if tuple(map(int, name.split("."))) > torch.cuda.get_device_capability():
        pytest.skip(f"this GPU cannot run the kernels of {name}")


class Chosen:
    """Counts calls of a function that stays in its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.num_calls, self._call = 0, getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._call(*args, **kwargs)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


def experts_inputs() -> tuple[torch.Tensor, torch.Tensor, reference.Routing]:
    register_ops()
    generator = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(96, 64, device=CUDA, dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(4, 48, 64, device=CUDA, dtype=torch.bfloat16, generator=generator)
    return x, weight, route(torch.randint(4, (96, 2), device=CUDA, generator=generator), 4)


class TestOnTheGpu:
    pytestmark = needs_gpu

    def test_products_of_experts_by_torch_where_the_gpu_has_them(
        self, gpu: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, _, _ = gpu
        only_on_this_gpu(name)
        # without our own kernels, torch's grouped product or the plain loop is what is left
        monkeypatch.setattr("flatout.kernels.moe._has_kernels", lambda *_: False)
        grouped = Chosen(monkeypatch, reference, "grouped_mm")
        x, weight, routing = experts_inputs()
        ours = grouped_linear(x, weight, routing, gather=True)
        assert grouped.num_calls == (name != "7.5")
        truth = reference.grouped_linear(x.double(), weight.double(), routing, gather=True)
        assert relative_error(ours, truth) < 0.01

    def test_float8_products_of_experts(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        name, float8, _ = gpu
        only_on_this_gpu(name)
        plain = Chosen(monkeypatch, reference, "grouped_linear_fp8")
        x, weight, routing = experts_inputs()
        values, scale = quantize_rows(weight)
        ours = grouped_linear_fp8(x, values, routing, gather=True, out_scale=scale[..., 0])
        assert plain.num_calls == (not float8)
        truth = reference.grouped_linear(x.double(), values.double() * scale.double(), routing, gather=True)
        # the rows are rounded to three bits
        assert relative_error(ours, truth) < 0.04

    def test_quantized_activations_of_experts(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        name, float8, _ = gpu
        only_on_this_gpu(name)
        plain = Chosen(monkeypatch, reference, "swiglu")
        _, _, routing = experts_inputs()
        generator = torch.Generator(CUDA).manual_seed(1)
        rows = torch.randn(192, 64, device=CUDA, dtype=torch.bfloat16, generator=generator)
        hidden, values, scale = swiglu(rows, routing, torch.ones(4, 32, device=CUDA))
        assert plain.num_calls == (not float8)
        truth = reference.swiglu(rows.double(), routing)[0]
        assert relative_error(hidden, truth) < 0.01
        assert relative_error(values.double() * scale.double()[:, None], truth) < 0.04

    def test_weights_that_float8_cannot_multiply_say_so(self, gpu: Any) -> None:
        _, float8, _ = gpu
        assert (fp8_problem(CUDA, 64, 64) is None) == float8

    def test_a_model_trains_alike_on_every_path(self, gpu: Any, tmp_path: Any) -> None:
        """Loss and gradients of a whole model, with the attention and products that this capability chooses."""
        name, _, best = gpu
        only_on_this_gpu(name)
        save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2, head_dim=64)
        samples = tiny_samples([70, 33, 5, 1, 120])

        def loss_and_gradient(**given: Any) -> tuple[str, torch.Tensor]:
            loaded = load_model(ModelConfig(name=str(tmp_path), **given), method="lora", device=CUDA, seed=0)
            add_lora(loaded.model, LoraConfig(rank=8), seed=0)
            parameters = list(trainable_parameters(loaded.model).values())
            generator = torch.Generator(CUDA).manual_seed(0)
            for parameter in parameters:
                parameter.data.normal_(0, 0.02, generator=generator)
            loss = packed_cross_entropy(loaded.model, flatten_samples(samples).to(CUDA)).loss_sum
            gradients = [gradient.flatten().double() for gradient in torch.autograd.grad(loss, parameters)]
            return loaded.attention, torch.cat([loss.detach().double()[None], *gradients])

        attention, ours = loss_and_gradient(precision="bf16")
        # the packages may be missing here
        assert attention == "sdpa" if best == "sdpa" else attention != "sdpa"
        _, truth = loss_and_gradient(precision="fp32", attention="plain")
        assert ours[0].item() == pytest.approx(truth[0].item(), rel=0.02)
        assert torch.nn.functional.cosine_similarity(ours[1:], truth[1:], dim=0) > 0.99
