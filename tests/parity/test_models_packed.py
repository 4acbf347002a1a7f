"""Packed documents through real architectures: equal to each document alone, and blind to each other."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES, tiny_model, tiny_samples, use_rotary_table
from usual import usual

from flatout.errors import UsageError
from flatout.models.attention import registered_name
from flatout.models.blocks import document_arguments
from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples

LENGTHS = [5, 17, 1, 9, 12]
CASES = [
    (family, form)
    for family, form in itertools.product(FAMILIES, ("plain", "sdpa"))
    if (family, form) != ("gemma2", "sdpa")
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def pair(family, form, dtype):
    ours = use_rotary_table(tiny_model(family, dtype, registered_name(form)))
    truth = use_rotary_table(tiny_model(family, dtype, "truth"))
    truth.load_state_dict(ours.state_dict())
    return ours, truth


def packed_logits(model, batch):
    return model(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        **document_arguments(batch),
    ).logits[0]


def alone_loss(model, samples):
    """The plain way: each sample through the model by itself, the next token of every row, masked, summed."""
    total, logits = 0.0, []
    for token_ids, loss_mask in samples:
        ids = torch.from_numpy(token_ids)
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        losses = F.cross_entropy(logits[-1][:-1], ids[1:], reduction="none")
        total = total + losses[torch.from_numpy(loss_mask)[1:]].sum()
    return total, torch.cat(logits)


def relative(ours, truth):
    return float(((ours - truth).norm() / truth.norm().clamp_min(1e-30)).detach())


# each family by one form, and each form
SOME = [case for case in CASES if case[1] == "sdpa" or case[0] in ("gemma2", "gemma3_text", "mistral")]


@pytest.mark.parametrize("dtype", usual([torch.float64, torch.float32], [torch.float64]), ids=["fp64", "fp32"])
@pytest.mark.parametrize(("family", "form"), usual(CASES, SOME))
def test_packed_equals_alone(family, form, dtype):
    ours, truth = pair(family, form, dtype)
    samples = tiny_samples(LENGTHS)
    batch = flatten_samples(samples)
    sums = packed_cross_entropy(ours, batch, tile_rows=5)
    loss, logits = alone_loss(truth, samples)
    logits_ours = packed_logits(ours, batch)
    assert relative(logits_ours, logits) < TOLERANCE[dtype]
    assert relative(sums.loss_sum, loss) < TOLERANCE[dtype]
    assert int(sums.num_correct) == int((logits[batch.label_rows].argmax(-1) == batch.label_ids).sum())
    sums.loss_sum.backward()
    loss.backward()
    for (name, mine), true in zip(ours.named_parameters(), truth.parameters(), strict=True):
        # Gemma's norms multiply by their weight in float32, so that weight's gradient is a float32 sum over rows
        loose = family.startswith("gemma") and "norm" in name
        assert relative(mine.grad, true.grad) < (
            1e-5 if loose else TOLERANCE[dtype] * (1 if dtype.itemsize == 8 else 10)
        ), name


@pytest.mark.parametrize(("family", "form"), usual(CASES, SOME[::2]))
def test_no_document_sees_another(family, form):
    model, _ = pair(family, form, torch.float64)
    batch = flatten_samples(tiny_samples(LENGTHS))
    documents = torch.bucketize(torch.arange(batch.num_tokens), batch.cu_seqlens[1:], right=True)
    embedded = model.get_input_embeddings()(batch.token_ids).detach()

    def run(inputs):
        return model(
            inputs_embeds=inputs[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            **document_arguments(batch),
        ).logits[0]

    before = run(embedded)
    for changed in (1, 3):
        noise = torch.randn(embedded.shape, dtype=embedded.dtype, generator=torch.Generator().manual_seed(changed))
        moved = torch.where((documents == changed)[:, None], noise, embedded).requires_grad_(True)
        after = run(moved)
        others = documents != changed
        # a fused expert GEMM groups rows of all documents, but each row's own arithmetic is the same
        limit = 1e-12 if family == "qwen3_moe" else 0.0
        assert float((after - before)[others].detach().abs().max()) <= limit
        (gradient,) = torch.autograd.grad(after[others].square().sum(), moved)
        assert float(gradient[documents == changed].abs().max()) == 0.0
        assert float((after - before)[documents == changed].detach().abs().max()) > 1e-3


def test_bf16_autocast_mixes_no_dtypes_and_stays_close():
    model = tiny_model("qwen3", torch.float32, "flatout_documents")
    batch = flatten_samples(tiny_samples(LENGTHS))
    exact = packed_cross_entropy(model, batch).loss_sum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = packed_cross_entropy(model, batch)
    sums.loss_sum.backward()
    assert sums.loss_sum.dtype == torch.float32
    assert relative(sums.loss_sum.detach(), exact.detach()) < 0.02
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_a_window_that_comes_through_the_mask_only_is_refused():
    model = tiny_model(
        "phimoe", attention="flatout_plain", num_local_experts=2, num_experts_per_tok=1, sliding_window=8
    )
    packed_cross_entropy(model, flatten_samples(tiny_samples([4, 3])))
    with pytest.raises(UsageError, match="window"):
        packed_cross_entropy(model, flatten_samples(tiny_samples([4, 3, 9])))


def test_generation_with_packed_attention_is_refused():
    model = tiny_model("llama", attention="flatout_documents")
    with pytest.raises(UsageError, match="to generate, load the model with sdpa"):
        model(input_ids=torch.tensor([[3, 4]]))


@pytest.mark.parametrize("family", usual(["qwen3", "mistral", "gemma3_text"], ["mistral"]))
@pytest.mark.parametrize("form", ["sdpa", "plain"])
def test_kernel_shapes_change_no_loss(family, form):
    model = tiny_model(family, torch.float64, attention=registered_name(form))
    samples = tiny_samples([5, 17, 1, 40])
    results = []
    for num_boundaries in (None, 64):
        model.zero_grad()
        loss = packed_cross_entropy(model, flatten_samples(samples, num_boundaries=num_boundaries)).loss_sum
        loss.backward()
        results.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    assert float(results[0][0]) == pytest.approx(float(results[1][0]), rel=1e-7)
    assert float((results[0][1] - results[1][1]).norm() / results[0][1].norm()) < 1e-6
