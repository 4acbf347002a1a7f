"""On a CUDA GPU: running out of memory is survived, recompute levels agree, and offloading frees what it says."""

import gc
import json

import pytest
import torch
from tiny_models import save_tiny_model, tiny_samples
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from flatout.config.schema import ExpertsConfig, LoraConfig, ModelConfig
from flatout.models.auxiliary_loss import StepFacts
from flatout.models.compile.layers import CompileOptions, compile_layers
from flatout.models.compile.recompute import apply_recompute, compiling_with
from flatout.models.experts.router import Routers
from flatout.models.load.model import load_model
from flatout.models.lora.layer import add_lora, trainable_parameters
from flatout.models.model_with_loss import ModelWithLoss, packed_cross_entropy
from flatout.models.packed import flatten_samples, padded_num_boundaries
from flatout.track.callback import MemoryCallback
from flatout.trainer.run import train

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 1024, "initializer_range": 0.05}
CUDA = torch.device("cuda", 0)
BORDERS = padded_num_boundaries(20)


def model_at(folder, level, compiled):
    torch._dynamo.reset()
    loaded = load_model(ModelConfig(name=str(folder)), method="lora", device=CUDA, seed=0)
    add_lora(loaded.model, LoraConfig(rank=8), seed=0)
    generator = torch.Generator(CUDA).manual_seed(0)
    for parameter in trainable_parameters(loaded.model).values():
        parameter.data.normal_(0, 0.02, generator=generator)
    apply_recompute(loaded.model, level)
    with compiling_with(level):
        outcome = compile_layers(
            loaded, "auto" if compiled else "off", CompileOptions(BORDERS, largest_pass_tokens=16384)
        )
    assert outcome.is_complete == compiled, outcome.line
    return loaded


def peak_and_gradient(loaded, batch):
    parameters = list(trainable_parameters(loaded.model).values())
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = packed_cross_entropy(loaded.model, batch).loss_sum / batch.num_label_tokens
        kept = torch.cuda.memory_allocated() - before
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        del loss
    return kept, gradient


@pytest.mark.parametrize("compiled", [True, False])
def test_levels_agree_and_each_keeps_less(tmp_path, compiled):
    save_tiny_model(tmp_path, "qwen3", **SHAPE, num_hidden_layers=8)
    batch = flatten_samples(tiny_samples([2000, 3000, 1500, 1692]), num_boundaries=BORDERS).to(CUDA)
    kept, gradients = {}, {}
    for level in ("none", "selective", "budget", "full", "offload") if compiled else ("none", "full", "offload"):
        kept[level], gradients[level] = peak_and_gradient(model_at(tmp_path, level, compiled), batch)
        assert torch.nn.functional.cosine_similarity(gradients["none"], gradients[level], dim=0) > 0.999
    assert list(kept.values()) == sorted(kept.values(), reverse=True)
    num_inputs_bytes = 8 * batch.num_tokens * 512 * 2
    assert kept["full"] > num_inputs_bytes
    assert kept["offload"] < kept["full"] - num_inputs_bytes / 3


def test_recomputed_experts_compile_beside_losses_on_their_routers(tmp_path):
    save_tiny_model(tmp_path, "qwen3_moe", **SHAPE, num_hidden_layers=2)
    batch = flatten_samples(tiny_samples([200, 300, 150, 92]), num_boundaries=BORDERS).to(CUDA)
    found = {}
    for level in ("none", "full"):
        torch._dynamo.reset()
        loaded = load_model(ModelConfig(name=str(tmp_path)), method="full", device=CUDA, seed=0)
        loss = ModelWithLoss(loaded.model)
        routers = Routers(loaded.model, ExpertsConfig(balance_loss=100.0, z_loss=1.0))
        loss.aux_loss = routers
        apply_recompute(loaded.model, level)
        outcome = compile_layers(loaded, "auto", CompileOptions(BORDERS), loss=loss)
        assert outcome.is_complete, outcome.line
        loaded.model.zero_grad()
        routers.start_step(StepFacts(0, 742, 738.0, CUDA, lambda values: values))
        with torch.autocast("cuda", dtype=loaded.dtype, enabled=loaded.autocast):
            loss_sum, _ = loss(batch)
        loss_sum.backward()
        router = next(parameter for name, parameter in loaded.model.named_parameters() if "mlp.gate." in name)
        found[level] = [routers.sums, router.grad.double().flatten(), loss_sum.detach().double()[None]]
    for one, other in zip(found["none"], found["full"], strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
        assert other.norm().item() == pytest.approx(one.norm().item(), rel=0.02)


def test_a_compiled_step_offloads_without_recompiling(tmp_path):
    save_tiny_model(tmp_path, "qwen3", **SHAPE, num_hidden_layers=4)
    loaded = model_at(tmp_path, "offload", compiled=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([5, 300, 1, 90], [64], [2000, 300], [3] * 15):
            batch = flatten_samples(tiny_samples(lengths), num_boundaries=BORDERS).to(CUDA)
            packed_cross_entropy(loaded.model, batch).loss_sum.backward()


@pytest.fixture
def wide_model(tiny, tmp_path):
    """A model whose activations, not its workspaces, decide: about 1.3 GB for the 5 k tokens of a step below."""
    folder = tmp_path / "model"
    shape = Qwen3Config.from_pretrained(tiny.model_dir)
    shape.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4})
    shape.update({"layer_types": ["full_attention"] * 4, "max_window_layers": 4})
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model_dir).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_survives_memory_that_is_too_small(tiny, tmp_path, wide_model, method):
    """A real out-of-memory: the process may take only 0.6 of what its largest micro-batch needs."""
    told = {}

    def run_peak_bytes(name):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        config = tiny.config(
            tmp_path / name,
            method=method,
            device="cuda",
            compile="off",
            recompute="none",
            model={"name": str(wide_model), "precision": "fp32"},
            batch={"samples_per_step": 60, "micro_batch_tokens": 100_000, "max_steps": 4},
        )
        told[name] = MemoryCallback()
        train(config, callbacks=[told[name]])
        return torch.cuda.max_memory_allocated() - before

    def losses_of(name):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]

    def compares_peaks(name):
        return any(stage == "memory" and ", measured " in text for _, stage, text in told[name].stages)

    needed_bytes = run_peak_bytes("calm")
    gc.collect()
    torch.cuda.empty_cache()
    allowed_bytes = torch.cuda.memory_reserved() + 0.6 * needed_bytes
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info()[1], CUDA)
    try:
        run_peak_bytes("tight")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    events = map(json.loads, (tmp_path / "tight" / "events.jsonl").read_text().splitlines())
    assert [event["cap_tokens"] for event in events if event["kind"] == "out_of_memory"]
    # the failed pass sets the peak, and the plan has no such pass
    assert compares_peaks("calm")
    assert not compares_peaks("tight")
    assert losses_of("tight") == pytest.approx(losses_of("calm"), rel=1e-4)
