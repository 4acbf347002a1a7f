"""Rope that depends on the length of its input: each packed document is scaled as transformers scales it alone."""

import copy

import pytest
import torch
from test_models_packed import alone_loss, packed_logits, relative
from tiny_models import save_tiny_model, tiny_model, tiny_samples
from usual import usual

from flatout.config.schema import ModelConfig
from flatout.errors import UsageError
from flatout.models.load.model import LoadedModel, load_model
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples
from flatout.models.rope import plain_rope, scale_by_document
from flatout.models.selftest import check_packing

LIMIT = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
CASES = {
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}),
    "llama longrope": ("llama", {"rope_parameters": LONGROPE}),
    "phimoe longrope": ("phimoe", {**PHIMOE, "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.5}}),
    "llama dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "cohere dynamic": ("cohere", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "gemma3 by layer": (
        "gemma3_text",
        {
            "max_position_embeddings": LIMIT,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": DYNAMIC,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
# on both sides of the limit, at it, and two long ones of which the shorter comes second
LENGTHS = [20, 90, LIMIT, 7, 70, LIMIT + 1]


def model_of(case, attention):
    family, changes = CASES[case]
    # configs write into what they are given
    return tiny_model(family, attention=attention, **copy.deepcopy(changes))


@pytest.fixture(params=usual(CASES, ["phi3 longrope", "cohere dynamic", "gemma3 by layer"]))
def models(request):
    ours, truth = (model_of(request.param, name) for name in ("flatout_documents", "sdpa"))
    assert scale_by_document(ours)
    return ours, truth


def alone_on_a_fresh_model(truth, samples):
    """Each document through transformers by itself, and before it a short one, after which nothing is remembered."""
    total, logits = 0.0, []
    for sample in samples:
        truth(input_ids=torch.tensor([[1]]), use_cache=False)
        loss, alone = alone_loss(truth, [sample])
        total, logits = total + loss, [*logits, alone]
    return total, torch.cat(logits)


def test_packed_equals_each_document_alone(models):
    ours, truth = models
    samples = tiny_samples(LENGTHS)
    loss, logits = alone_on_a_fresh_model(truth, samples)
    batch = flatten_samples(samples)
    sums = packed_cross_entropy(ours, batch)
    # rotary's cosines are float32, and those of another vector differ in the last bit
    assert relative(packed_logits(ours, batch), logits) < 1e-6
    assert relative(sums.loss_sum, loss) < 1e-7
    sums.loss_sum.backward()
    loss.backward()
    ours_grad, truth_grad = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models)
    assert relative(ours_grad, truth_grad) < 1e-6


def test_what_came_before_changes_no_bit(models):
    """A resumed run has not seen the documents of the steps before it."""
    ours, _ = models
    batch = flatten_samples(tiny_samples(LENGTHS))
    before = packed_logits(ours, batch)
    packed_logits(ours, flatten_samples(tiny_samples([120, 3])))
    assert torch.equal(packed_logits(ours, batch), before)


def test_the_fault_is_there_without_it(models):
    ours, truth = models
    samples = tiny_samples(LENGTHS)
    _, logits = alone_on_a_fresh_model(truth, samples)
    with plain_rope(ours):
        assert relative(packed_logits(ours, flatten_samples(samples)), logits) > 1e-3


@pytest.mark.parametrize("precision", usual(["fp64", "fp32", "bf16"], ["fp32"]))
@pytest.mark.parametrize("case", ["phi3 longrope", "llama dynamic"])
def test_loading_swaps_and_the_self_test_sees_a_document_beyond_the_limit(tmp_path, case, precision):
    family, changes = CASES[case]
    save_tiny_model(tmp_path, family, **copy.deepcopy(changes))
    loaded = load_model(
        ModelConfig(name=str(tmp_path), precision=precision), method="lora", device=torch.device("cpu"), seed=0
    )
    assert any(line.startswith("rope ") and f"beyond {LIMIT} tokens" in line for line in loaded.report)
    assert f"; beyond {LIMIT} tokens within" in check_packing(loaded, longest=100)
    assert "beyond" not in check_packing(loaded, longest=LIMIT)


def test_the_self_test_refuses_rope_of_the_whole_batch():
    model = model_of("phi3 longrope", "flatout_documents")
    loaded = LoadedModel(model=model, dtype=torch.float64, autocast=False, attention="sdpa", report=())
    check_packing(loaded)
    with pytest.raises(UsageError, match="model type phi3: a packed document of 64 tokens differs"):
        check_packing(loaded, longest=100)
