"""The tiled loss head against torch's cross-entropy over all logits: values, counts and every gradient."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model, tiny_samples
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from usual import every

from flatout.config.schema import LoraConfig
from flatout.errors import UsageError
from flatout.kernels.cross_entropy import tiled
from flatout.kernels.cross_entropy.tiled import tile_terms
from flatout.models import model_with_loss, token_head
from flatout.models.lora.layer import add_lora
from flatout.models.lora.saved import TrainedRows
from flatout.models.model_with_loss import packed_cross_entropy, prepare_head
from flatout.models.packed import flatten_samples
from flatout.models.token_head import TokenHead
from flatout.objectives.cross_entropy import CrossEntropy
from flatout.objectives.loss_inputs import LabelTokens, SampleScores, target_losses


def problem(num_rows, width, vocabulary, dtype=torch.float64, size=1.0):
    generator = torch.Generator().manual_seed(num_rows * 1000 + vocabulary)
    hidden = torch.randn(num_rows, width, generator=generator, dtype=torch.float64) * size
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, (num_rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(True), weight.to(dtype).requires_grad_(True), targets


def reference_loss(hidden, weight, targets, *, scale=1.0, softcap=None):
    logits = token_head.scaled_logits(F.linear(hidden, weight), scale, softcap)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()


def run(function, hidden, weight, targets, **arguments):
    loss_sum, num_correct, *_ = function(hidden, weight, targets, **arguments)
    gradients = torch.autograd.grad(loss_sum * 0.37, (hidden, weight))
    return loss_sum.detach(), num_correct, *gradients


def equal(ours, truth, tolerance):
    assert int(ours[1]) == int(truth[1])
    for mine, true in zip((ours[0], *ours[2:]), (truth[0], *truth[2:]), strict=True):
        assert mine.dtype == true.dtype
        torch.testing.assert_close(mine, true, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tile_rows", [1, 3, 64])
@pytest.mark.parametrize(("num_rows", "width", "vocabulary"), [(1, 1, 2), (7, 5, 11), (64, 16, 33), (65, 3, 257)])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.125, None), (1.0, 3.0), (2.5, 1.5)])
def test_equals_cross_entropy(num_rows, width, vocabulary, scale, softcap, tile_rows):
    arguments = {"scale": scale, "softcap": softcap}
    inputs = problem(num_rows, width, vocabulary)
    truth = run(reference_loss, *inputs, **arguments)
    equal(run(tiled.token_loss, *inputs, **arguments, tile_rows=tile_rows), truth, 1e-11)
    inputs32 = problem(num_rows, width, vocabulary, torch.float32)
    ours32 = run(tiled.token_loss, *inputs32, **arguments, tile_rows=tile_rows)
    equal(ours32, run(reference_loss, *inputs32, **arguments), 2e-4 if vocabulary > 100 else 5e-5)


@pytest.mark.parametrize("head", ["tiled", "tiled by row", "module", "scores"])
@pytest.mark.parametrize("gap", [8, 16, 24, 60])
@pytest.mark.parametrize("top", [10, 200])
def test_near_certainty(top, gap, head):
    """A loss of 1e-3 to 1e-20 and its gradient keep their digits; 1 - p and log p from p have none left of 1e-8."""
    generator = torch.Generator().manual_seed(gap)
    logits = torch.randn(6, 300, generator=generator) + (top - gap)
    targets = torch.randint(0, 300, (6,), generator=generator)
    logits[torch.arange(6), targets] = float(top)
    logits.requires_grad_()
    if head == "module":
        ours = target_losses(logits, targets)
    elif head == "scores":
        ours = SampleScores(logits, SimpleNamespace(last_rows=torch.arange(6)), lambda rows: rows).cross_entropy(
            targets
        )
    else:
        # the weight is the identity, so hidden states are logits
        ours = tiled.token_loss(logits, torch.eye(300), targets, by_row=head == "tiled by row")[0]
    wide = logits.detach().double().requires_grad_()
    others = wide.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
    truth = F.softplus(others - wide.gather(1, targets[:, None])[:, 0], threshold=1e9)
    (mine,), (true,) = torch.autograd.grad(ours.sum(), logits), torch.autograd.grad(truth.sum(), wide)
    torch.testing.assert_close(ours.double().sum(), truth.sum(), atol=0, rtol=1e-5)
    torch.testing.assert_close(mine.double(), true, atol=0, rtol=1e-4)


def by_row(losses_of, hidden, weight, targets, **arguments):
    """Losses by row, which rows are right, and gradients of a loss in which rows have factors of their own."""
    losses, is_correct, *_ = losses_of(hidden, weight, targets, **arguments)
    factors = torch.linspace(-2, 3, len(targets), dtype=losses.dtype, device=losses.device)
    trained = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
    return losses.detach(), is_correct, *torch.autograd.grad((losses * factors).tanh().sum(), trained)


def plain_by_row(hidden, weight, targets, scale=1.0, softcap=None):
    logits = F.linear(hidden, weight) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


BY_ROW = [
    (*sizes, *shape, tile_rows, trains_head)
    for sizes in ((0, 3, 4), (1, 1, 2), (7, 5, 11), (65, 3, 257))
    for shape in ((1.0, None), (2.5, 1.5))
    for tile_rows in (1, 3, 64)
    for trains_head in (True, False)
]


@pytest.mark.parametrize(
    ("num_rows", "width", "vocabulary", "scale", "softcap", "tile_rows", "trains_head"), every(5, BY_ROW)
)
def test_losses_by_row_have_gradients_of_their_own(
    num_rows, width, vocabulary, scale, softcap, tile_rows, trains_head, monkeypatch
):
    """New memory starts as NaN: whatever is read must have been written."""
    arguments = {"scale": scale, "softcap": softcap}
    problems = [problem(num_rows, width, vocabulary, dtype) for dtype in (torch.float64, torch.float32)]
    for _, weight, _ in problems:
        weight.requires_grad_(trains_head)
    truths = [by_row(plain_by_row, *inputs, **arguments) for inputs in problems]
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(
            torch,
            name,
            lambda *a, real=real, **k: t.fill_(float("nan")) if (t := real(*a, **k)).is_floating_point() else t,
        )
    for inputs, truth, tolerance in zip(problems, truths, (1e-11, 2e-4), strict=True):
        ours = by_row(tiled.token_loss, *inputs, **arguments, tile_rows=tile_rows, by_row=True)
        assert torch.equal(ours[1], truth[1])
        for mine, true in zip((ours[0], *ours[2:]), (truth[0], *truth[2:]), strict=True):
            assert mine.dtype == true.dtype
            torch.testing.assert_close(mine, true, atol=tolerance, rtol=tolerance)


def test_losses_by_row_sum_to_the_loss_to_the_bit():
    hidden, weight, targets = problem(20, 6, 17, torch.float32)
    frozen = weight.detach()
    loss_sum, num_correct, _ = tiled.token_loss(hidden, frozen, targets)
    losses, is_correct, _ = tiled.token_loss(hidden, frozen, targets, by_row=True)
    assert torch.equal(losses.sum(), loss_sum)
    assert int(is_correct.sum()) == int(num_correct)
    for one, other in zip(*(torch.autograd.grad(loss / 7, hidden) for loss in (loss_sum, losses.sum())), strict=True):
        assert torch.equal(one, other)


def test_replaced_rows_are_trained_by_row_too():
    hidden, weight, targets = problem(9, 4, 13)
    ids, values = torch.tensor([2, 11]), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    factors = torch.linspace(-1, 2, 9, dtype=torch.float64)
    whole = weight.detach().index_copy(0, ids, values)
    truth = torch.autograd.grad((plain_by_row(hidden, whole, targets)[0] * factors).sum(), (hidden, values))
    losses, *_ = tiled.token_loss(
        hidden, weight.detach(), targets, trained_rows=(ids, values), tile_rows=4, by_row=True
    )
    for mine, true in zip(torch.autograd.grad((losses * factors).sum(), (hidden, values)), truth, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-12, rtol=1e-12)


def test_reference_is_torchs_cross_entropy():
    hidden, weight, targets = problem(9, 4, 13)
    loss_sum, num_correct = reference_loss(hidden, weight, targets)
    logits = hidden @ weight.T
    torch.testing.assert_close(loss_sum, F.cross_entropy(logits, targets, reduction="sum"))
    assert int(num_correct) == int((logits.argmax(-1) == targets).sum())


class LiveTensors(TorchDispatchMode):
    """The most tensors of one shape that were alive at once."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.alive, self.most = shape, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and tuple(output.shape) == self.shape:
            self.alive = [storage for storage in self.alive if not storage.expired()]
            storage = StorageWeakRef(output.untyped_storage())
            self.alive += [storage] if storage not in self.alive else []
            self.most = max(self.most, len(self.alive))
        return output


def test_only_one_tiles_logits_are_alive():
    """fp32 makes the gradient in the logits' own place; 16 bit needs a product, fp32 logits and a gradient."""
    for dtype, expected in ((torch.float32, 1), (torch.bfloat16, 3)):
        with LiveTensors((8, 50)) as seen:
            run(tiled.token_loss, *problem(40, 6, 50, dtype), tile_rows=8)
        assert seen.most == expected


def test_huge_logits_stay_finite():
    inputs = problem(12, 8, 50, size=1e4)
    ours = run(tiled.token_loss, *inputs, tile_rows=5)
    assert all(bool(tensor.isfinite().all()) for tensor in ours)
    equal(ours, run(reference_loss, *inputs), 1e-9)


def test_strided_hidden_and_weight():
    hidden, weight, targets = problem(20, 6, 17)
    wide = torch.zeros(20, 12, dtype=torch.float64)
    wide[:, ::2] = hidden.detach()
    strided = wide[:, ::2].detach().requires_grad_(True)
    transposed = weight.detach().T.contiguous().T.requires_grad_(True)
    equal(
        run(tiled.token_loss, strided, transposed, targets, tile_rows=7),
        run(reference_loss, hidden, weight, targets),
        1e-12,
    )


def test_memory_poisoned_with_nan(monkeypatch):
    """Whatever the tiled form reads it must have written: new memory starts as NaN."""
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: real(*a, **k).fill_(float("nan")))
    inputs = problem(13, 5, 19)
    equal(run(tiled.token_loss, *inputs, tile_rows=4), run(reference_loss, *inputs), 1e-12)


def test_no_rows_give_zero_with_a_live_graph():
    hidden, weight, targets = problem(3, 4, 7)
    loss_sum, num_correct, _ = tiled.token_loss(hidden[:0], weight, targets[:0])
    gradients = torch.autograd.grad(loss_sum, (hidden, weight))
    assert float(loss_sum) == 0.0
    assert int(num_correct) == 0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)


def test_frozen_weight_gets_no_gradient_and_no_grad_makes_none():
    hidden, weight, targets = problem(5, 4, 7)
    frozen = weight.detach()
    tiled.token_loss(hidden, frozen, targets)[0].backward()
    assert frozen.grad is None
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(reference_loss(hidden, frozen, targets)[0], hidden)[0])
    with torch.no_grad():
        assert not tiled.token_loss(hidden, weight, targets)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_errs_no_more_than_plain(dtype):
    """Rule K, mean of 8 seeds: at most 2x (loss) and 3x (gradients) the plain form's own error against fp64."""
    errors = {"ours": torch.zeros(3), "plain": torch.zeros(3)}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(40, 32, generator=generator).to(dtype)
        weight = (torch.randn(101, 32, generator=generator) * 0.2).to(dtype)
        targets = torch.randint(0, 101, (40,), generator=generator)

        def gradients(function, to, hidden=hidden, weight=weight, targets=targets, **arguments):
            leaves = [tensor.to(to).requires_grad_(True) for tensor in (hidden, weight)]
            loss = function(*leaves, targets, **arguments)[0]
            return [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, leaves))]

        truth = gradients(reference_loss, torch.float64)
        for name, found in (
            ("ours", gradients(tiled.token_loss, dtype, tile_rows=7)),
            ("plain", gradients(reference_loss, dtype)),
        ):
            errors[name] += torch.tensor([float((a - b).norm()) for a, b in zip(found, truth, strict=True)])
    assert bool((errors["ours"] <= errors["plain"] * torch.tensor([2.0, 3.0, 3.0]) + 1e-6).all()), errors


def test_bad_tile_rows_are_refused():
    with pytest.raises(ValueError, match="tile_rows"):
        tiled.token_loss(*problem(3, 4, 7), tile_rows=0)


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_logit_scale_and_softcap_of_the_config(family, with_adapter):
    extra = {
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.25},
        "gemma2": {"final_logit_softcapping": 2.0},
    }
    model = tiny_model(family, attention="flatout_plain", tie_word_embeddings=False, **extra[family])
    if with_adapter:
        add_lora(model, LoraConfig(rank=2, targets=["lm_head"]), seed=0)
        nn.init.normal_(model.lm_head.lora_b, generator=torch.Generator().manual_seed(0))
    batch = flatten_samples(tiny_samples([6, 11]))
    logits = model(
        input_ids=batch.token_ids[None], position_ids=batch.position_ids[None], use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens, max_length_q=batch.max_seqlen,
    ).logits[0]  # fmt: skip
    truth = F.cross_entropy(logits[batch.label_rows], batch.label_ids, reduction="sum")
    torch.testing.assert_close(packed_cross_entropy(model, batch).loss_sum, truth, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["bias", "hook"])
def test_unusual_heads_go_through_the_module(kind):
    model = tiny_model("llama", attention="flatout_documents")
    if kind == "bias":
        model.lm_head.bias = nn.Parameter(torch.randn(300, dtype=torch.float64))
    else:
        model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    batch = flatten_samples(tiny_samples([6, 11]))
    hidden = model.model(
        input_ids=batch.token_ids[None], position_ids=batch.position_ids[None], use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens, max_length_q=batch.max_seqlen,
    ).last_hidden_state[0]  # fmt: skip
    truth = F.cross_entropy(model.lm_head(hidden[batch.label_rows]), batch.label_ids, reduction="sum")
    sums = packed_cross_entropy(model, batch, tile_rows=4)
    torch.testing.assert_close(sums.loss_sum, truth, atol=1e-11, rtol=1e-11)
    parameters = list(model.parameters())
    for mine, true in zip(
        torch.autograd.grad(sums.loss_sum, parameters), torch.autograd.grad(truth, parameters), strict=True
    ):
        torch.testing.assert_close(mine, true, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_batch_without_labels_gives_zero_with_a_live_graph(with_bias):
    model = tiny_model("llama", attention="flatout_documents")
    if with_bias:
        model.lm_head.bias = nn.Parameter(torch.zeros(300, dtype=torch.float64))
    sums = packed_cross_entropy(
        model, flatten_samples([(ids, trained & False) for ids, trained in tiny_samples([6, 11])])
    )
    sums.loss_sum.backward()
    assert float(sums.loss_sum) == 0.0
    assert int(sums.num_correct) == 0
    assert all(float(parameter.grad.abs().max()) == 0.0 for parameter in model.parameters())


def plain_entropy(logits):
    return torch.distributions.Categorical(logits=logits).entropy()


AT_A_TEMPERATURE = [
    (temperature, softcap, head)
    for temperature in (0.6, 1.0, 3.0)
    for softcap in (2.0, None)
    for head in ("plain", "trained", "bias", "lora", "new tokens")
]


def states_before(head, softcap):
    """A model with such a head, a batch, hidden states (T, D), and what gets gradients: these and what is trained."""
    extra = {"logits_scaling": 3.0} if softcap is None else {"final_logit_softcapping": softcap}
    family = "granite" if softcap is None else "gemma2"
    model = tiny_model(family, attention="flatout_plain", tie_word_embeddings=False, **extra)
    model.requires_grad_(head in ("trained", "bias"))
    if head == "bias":
        model.lm_head.bias = nn.Parameter(torch.randn(300, dtype=torch.float64))
    elif head == "lora":
        add_lora(model, LoraConfig(rank=2, targets=["lm_head"]), seed=0)
        nn.init.normal_(model.lm_head.lora_b, generator=torch.Generator().manual_seed(0))
    elif head == "new tokens":
        model.lm_head = TrainedRows(model.lm_head, [4, 299], None)
    batch = flatten_samples(tiny_samples([6, 11, 2]))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(len(batch.token_ids), model.config.hidden_size, dtype=torch.float64, generator=generator) * 3
    states.requires_grad_()
    return model, batch, states, [states, *(p for p in model.lm_head.parameters() if p.requires_grad)]


def shaped_logits(model, batch, states, softcap):
    product = model.lm_head(states[batch.label_rows])
    return product / 3 if softcap is None else softcap * torch.tanh(product / softcap)


@pytest.mark.parametrize(("softcap", "head"), {(softcap, head): None for _, softcap, head in AT_A_TEMPERATURE})
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.3, 0.0), (0.0, 0.2), (0.1, 0.05)])
def test_label_smoothing_and_z_loss_equal_torch(label_smoothing, z_loss, softcap, head):
    model, batch, states, trained = states_before(head, softcap)
    objective = CrossEntropy(label_smoothing=label_smoothing, z_loss=z_loss)
    sums = objective(LabelTokens(states, batch, TokenHead(model, 64)))
    gradients = torch.autograd.grad(sums["loss"] / 7, trained)
    logits, ids = shaped_logits(model, batch, states, softcap), batch.label_ids
    truth = F.cross_entropy(logits, ids, label_smoothing=label_smoothing, reduction="sum")
    truth = truth + z_loss * logits.logsumexp(-1).square().sum()
    plain = F.cross_entropy(logits, ids, reduction="sum")
    pairs = [(sums["loss"], truth), (sums["cross_entropy"], plain)]
    for mine, true in (*pairs, *zip(gradients, torch.autograd.grad(truth / 7, trained), strict=True)):
        torch.testing.assert_close(mine, true, atol=1e-11, rtol=1e-11)
    assert sums["token_accuracy"] == (logits.argmax(-1) == ids).sum()
    # evaluations have neither
    with torch.no_grad():
        torch.testing.assert_close(
            objective(LabelTokens(states, batch, TokenHead(model, 64)))["loss"], plain, atol=1e-11, rtol=1e-11
        )


@pytest.mark.parametrize(("temperature", "softcap", "head"), every(3, AT_A_TEMPERATURE))
def test_log_probabilities_and_entropy_at_a_temperature(temperature, softcap, head):
    """Of logits / T after their scale and soft-cap, in one pass for both, with the gradients of a loss over both."""
    model, batch, states, trained = states_before(head, softcap)
    num_calls = []
    token_head_of = TokenHead(model, 3)
    real = token_head_of.token_losses
    token_head_of.token_losses = lambda *a, **k: num_calls.append(1) or real(*a, **k)
    tokens = LabelTokens(states, batch, token_head_of)
    found_entropy, found = tokens.entropy_at(temperature), tokens.logprobs_at(temperature)
    term = tokens.entropy_at(temperature, with_graph=True)
    assert len(num_calls) == 1
    assert tokens.logprobs_at(temperature) is found
    factors = torch.linspace(-2, 3, len(found), dtype=torch.float64)
    gradients = torch.autograd.grad(((found + 0.3 * term) * factors).tanh().sum(), trained)

    shaped = shaped_logits(model, batch, states, softcap)
    truth = (shaped / temperature).log_softmax(-1).gather(1, batch.label_ids[:, None])[:, 0]
    entropy = plain_entropy(shaped / temperature)
    true_gradients = torch.autograd.grad(((truth + 0.3 * entropy) * factors).tanh().sum(), trained)
    assert not found_entropy.requires_grad
    for mine, true in (
        (found, truth),
        (found_entropy, entropy),
        (term, entropy),
        *zip(gradients, true_gradients, strict=True),
    ):
        torch.testing.assert_close(mine, true, atol=1e-11, rtol=1e-11)
    assert torch.equal(tokens.is_correct, shaped.argmax(-1) == batch.label_ids)
    assert len(num_calls) == 1
    # read later, it takes another pass, which changes nothing
    late = LabelTokens(states, batch, token_head_of)
    assert torch.equal(late.logprobs_at(temperature), found)
    assert torch.equal(late.entropy_at(temperature), found_entropy)


def test_a_temperature_of_1_changes_no_bit_and_0_is_refused():
    model = tiny_model("llama", attention="flatout_plain").float()
    batch = flatten_samples(tiny_samples([6, 11]))
    states = torch.randn(len(batch.token_ids), model.config.hidden_size)
    tokens = LabelTokens(states, batch, TokenHead(model, 4))
    assert tokens.logprobs_at(1) is tokens.logprobs
    direct = TokenHead(model, 4).token_losses(states[batch.label_rows], batch.label_ids).losses
    assert torch.equal(tokens.logprobs, -direct)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="temperature"):
            tokens.logprobs_at(temperature)


def test_entropy_in_16_bits_and_near_certainty():
    logits = torch.full((3, 500), -60.0)
    logits[:, 7] = torch.tensor([-60.0, 0.0, 60.0])
    _, _, entropies = tiled.token_loss(
        logits, torch.eye(500), torch.zeros(3, dtype=torch.int64), by_row=True, with_entropy=True
    )
    torch.testing.assert_close(entropies, plain_entropy(logits.double()).float(), atol=1e-6, rtol=1e-6)
    possible = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    with_impossible = F.pad(possible, (0, 2), value=-torch.inf)  # tokens that cannot come add nothing
    found, truth = tiled.row_entropies(with_impossible), plain_entropy(possible)
    torch.testing.assert_close(found, truth, atol=1e-12, rtol=0)
    gradients = (torch.autograd.grad(one.sum(), possible)[0] for one in (found, truth))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    hidden, weight, targets = problem(40, 16, 257, torch.bfloat16)
    truth = plain_entropy(F.linear(hidden.double(), weight.double()))
    _, _, entropies = tiled.token_loss(hidden, weight.detach(), targets, tile_rows=7, by_row=True, with_entropy=True)
    torch.testing.assert_close(entropies.double(), truth, atol=2e-2, rtol=2e-2)


@torch.enable_grad()
def plain_terms(logits, targets, scale, softcap, *, with_entropy=False):
    """Losses, correct rows, gradient by autograd, and entropies; rows with the target -1 do not count."""
    leaf, is_row = logits.detach().double().requires_grad_(), targets >= 0
    shaped = leaf * scale if softcap is None else softcap * torch.tanh(leaf * scale / softcap)
    losses = F.cross_entropy(shaped, targets.clamp(min=0), reduction="none") * is_row
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    entropies = plain_entropy(shaped.detach()) if with_entropy else losses.new_empty(0)
    return losses.detach(), shaped.argmax(-1) == targets, gradient.to(logits.dtype), entropies


@pytest.mark.parametrize("num_rows", [1, 127, 128, 300, 512])
def test_tiles_that_are_filled_up_give_the_same(num_rows, monkeypatch):
    """Fused tiles, of which all sizes are multiples of 128 rows, in fp32 without their kernel."""
    sizes = []
    monkeypatch.setattr(
        tiled, "tile_terms", lambda logits, *rest, **how: sizes.append(len(logits)) or plain_terms(logits, *rest, **how)
    )
    inputs = problem(num_rows, 5, 31, torch.float32)
    for softcap in (None, 2.0):
        truth = run(reference_loss, *inputs, scale=0.5, softcap=softcap)
        equal(run(tiled.token_loss, *inputs, scale=0.5, softcap=softcap, tile_rows=256, fused=True), truth, 5e-5)
        truth = by_row(plain_by_row, *inputs, scale=0.5, softcap=softcap)
        ours = by_row(tiled.token_loss, *inputs, scale=0.5, softcap=softcap, tile_rows=256, fused=True, by_row=True)
        for mine, true in zip(ours, truth, strict=True):
            torch.testing.assert_close(mine, true, atol=5e-5, rtol=5e-5)
    assert not any(size % 128 for size in sizes)
    # once for the sum; by row a trained head takes a second pass
    assert sum(sizes) == 2 * 3 * -(-num_rows // 128) * 128
    hidden, weight, targets = inputs
    # a tile of 200 rows is filled up beyond the start of the next one
    how = {"tile_rows": 200, "fused": True, "by_row": True, "with_entropy": True}
    entropies = tiled.token_loss(hidden, weight, targets, **how)[2]
    torch.testing.assert_close(entropies, plain_entropy(hidden @ weight.T), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [5, 4099, 8192, 50_000])
@pytest.mark.parametrize(("scale", "softcap", "size"), [(1, None, 3), (0.125, None, 3), (1, 3.0, 1), (2.5, 1.5, 0.5)])
def test_the_kernel_of_a_tile_equals_autograd(scale, softcap, size, vocabulary, dtype):
    """Also for padding rows, equal largest logits, of which the first counts, and values that are not finite."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(200, vocabulary, generator=generator, device="cuda").mul(size).to(dtype)
    # equal ones in one thread's columns, in another's, and in another block
    equal_columns = [1, 4, min(600, vocabulary - 1), vocabulary - 1]
    logits[:50, equal_columns] = logits.amax()
    targets = torch.randint(0, vocabulary, (200,), generator=generator, device="cuda")
    targets[:50] = torch.tensor(equal_columns, device="cuda").repeat(13)[:50]
    targets[50:100] = logits[50:100].argmax(-1)
    targets[100:110] = -1
    # in fp64, as two gradients rounded to bf16 may differ by one part in 128
    losses, is_correct, gradient, entropies = plain_terms(logits.double(), targets, scale, softcap, with_entropy=True)
    found_losses, found_correct, found, nothing = tile_terms(
        logits.clone(), targets, scale, softcap, with_entropy=False
    )
    assert not len(nothing)
    *with_entropy, found_entropies = tile_terms(logits.clone(), targets, scale, softcap, with_entropy=True)
    torch.testing.assert_close(found_entropies.double(), entropies, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, with_entropy, (found_losses, found_correct, found)))
    is_row = targets >= 0
    torch.testing.assert_close(found_losses.double(), losses, rtol=1e-6, atol=1e-5)
    assert torch.equal(found_correct.bool(), is_correct)
    assert int(is_correct.sum()) >= 63
    # the target's gradient is far larger than all others, which count on their own
    is_other = torch.arange(vocabulary, device="cuda")[None] != targets[:, None]
    for rows in (is_row[:, None] & is_other, is_row[:, None] & ~is_other):
        error = ((found - gradient) * rows).norm(dim=1)[is_row]
        # half the distance of subnormal numbers in each column
        least = vocabulary**0.5 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        assert bool((error <= 5e-3 * (gradient * rows).norm(dim=1)[is_row] + least + 1e-7).all())
    for value in ("nan", "inf") if softcap is None else ("nan",):
        broken = logits.clone()
        broken[150, vocabulary - 1] = float(value)
        losses, *_ = tile_terms(broken, targets, scale, softcap, with_entropy=False)
        assert losses.isfinite().tolist() == [row != 150 for row in range(200)]
    # a token that cannot come adds nothing to the entropy
    impossible, column = logits.clone(), int(targets[120] == 0)
    impossible[120, column] = float("-inf")
    if softcap is None:
        *_, found_entropies = tile_terms(impossible.clone(), targets, scale, softcap, with_entropy=True)
        rest = impossible[120].double()[impossible[120].isfinite()] * scale
        torch.testing.assert_close(found_entropies[120].double(), plain_entropy(rest), rtol=1e-5, atol=1e-5)


def test_the_head_is_prepared_for_every_size_of_a_tile(monkeypatch):
    model, sizes = tiny_model("llama", attention="flatout_plain"), []
    real = token_head.token_loss
    monkeypatch.setattr(
        token_head, "token_loss", lambda rows, *rest, **more: sizes.append(len(rows)) or real(rows, *rest, **more)
    )
    prepare_head(model, 512)
    assert not sizes  # in fp64 on a CPU tiles have the sizes they come in
    monkeypatch.setattr(model_with_loss, "is_fused", lambda device, dtype: True)
    prepare_head(model, 512)
    assert sizes == [128, 256, 384, 512]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_fused_tiles_err_no_more_than_plain_ones_on_the_gpu(softcap):
    """Rule K: at most 2x (loss) and 3x (gradients) the plain bf16 tiles' own error against fp64."""
    for num_rows in (1, 100, 3000):
        exact = [tensor.detach().cuda() for tensor in problem(num_rows, 64, 4099)]
        exact = [t.bfloat16().double() if t.is_floating_point() else t for t in exact]
        truth = run(reference_loss, *[t.requires_grad_(t.is_floating_point()) for t in exact], softcap=softcap)
        rounded = [t.detach().bfloat16().requires_grad_(True) if t.is_floating_point() else t for t in exact]
        plain, fused = (run(tiled.token_loss, *rounded, softcap=softcap, fused=on) for on in (False, True))
        for bound, index in ((2, 0), (3, 2), (3, 3)):
            errors = [float((got[index].double() - truth[index]).norm()) for got in (plain, fused)]
            assert errors[1] <= bound * errors[0] + 1e-6 * float(truth[index].norm())
        assert int(fused[1]) == int(plain[1])
        truth = by_row(plain_by_row, *[t.requires_grad_(t.is_floating_point()) for t in exact], softcap=softcap)
        plain, fused = (
            by_row(tiled.token_loss, *rounded, softcap=softcap, fused=on, by_row=True) for on in (False, True)
        )
        for bound, index in ((2, 0), (3, 2), (3, 3)):
            errors = [float((got[index].double() - truth[index]).norm()) for got in (plain, fused)]
            assert errors[1] <= bound * errors[0] + 1e-6 * float(truth[index].norm())
