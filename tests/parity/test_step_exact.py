"""One optimizer step in fp64: any way of cutting it up gives the loss and gradients of one padded batch."""

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built_run import built_run
from plans import make_plan
from torch import Tensor, nn

from flatout.models.model_with_loss import packed_cross_entropy
from flatout.models.packed import flatten_samples
from flatout.parallel.rank import Rank
from flatout.planner.steps.step_plan import StepPlan
from flatout.track.callback import Reporter
from flatout.trainer import build
from flatout.trainer.evaluate import WorstSamples, evaluate
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.state import TrainingRun
from flatout.trainer.step import accumulate_gradients, launch_step, step_launcher


def make_run(config: Any) -> tuple[TrainingRun, PlannedRun]:
    run = built_run(config)
    return run, run.planned


def gradients(run: TrainingRun) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in run.parameters if p.grad is not None]).clone()


def wake_adapter(run: TrainingRun) -> None:
    """LoRA's B starts at zero, where A has no gradient; random values make every gradient count."""
    generator = torch.Generator().manual_seed(1)
    for parameter in run.parameters:
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def padded_reference(run: TrainingRun, planned: PlannedRun, step: StepPlan) -> tuple[float, Tensor]:
    """Mean loss over the step's label tokens and its gradient, from right-padded rows through model(...).logits."""
    samples = [planned.store.sample(i).pair for i in step.sample_ids]
    longest = max(len(ids) for ids, _ in samples)
    loss_sum, num_labels = torch.zeros((), dtype=torch.float64), 0
    run.optimizer.zero_grad(set_to_none=True)
    run.fused_lora.refresh()
    for ids, loss_mask in samples:
        row = torch.zeros((1, longest), dtype=torch.long)
        row[0, : len(ids)] = torch.tensor(ids.tolist())
        targets = torch.where(torch.tensor(loss_mask.tolist()), row[0, : len(ids)], -100)[1:]
        document = {"cu_seq_lens_q": torch.tensor([0, longest], dtype=torch.int32), "max_length_q": longest}
        logits = run.model(input_ids=row, position_ids=torch.arange(longest)[None], use_cache=False, **document).logits
        loss_sum = loss_sum + F.cross_entropy(logits[0, : len(ids) - 1], targets, reduction="sum", ignore_index=-100)
        num_labels += int((targets != -100).sum())
    assert num_labels == step.num_label_tokens
    loss = loss_sum / num_labels
    loss.backward()
    return loss.item(), gradients(run)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_packed_and_accumulated_equal_padded(tiny, tmp_path, method):
    config = tiny.config(
        tmp_path,
        method=method,
        model={"name": str(tiny.model_dir), "precision": "fp64"},
        batch={"samples_per_step": 20, "micro_batch_tokens": 700},
    )
    run, planned = make_run(config)
    wake_adapter(run)
    loss, expected = padded_reference(run, planned, planned.plan.step(0))
    cuts = []
    for budget in (600, 1200, 100_000):
        cut = resplit(config, planned, budget, num_ranks=1).step(0)
        cuts.append(len(cut.by_rank[0]))
        run.optimizer.zero_grad(set_to_none=True)
        loss_sum, _ = accumulate_gradients(run, cut)
        assert loss_sum.item() / cut.num_label_tokens == pytest.approx(loss, rel=1e-12)
        assert ((gradients(run) - expected).norm() / expected.norm()).item() < 1e-12
    assert cuts[0] > cuts[1] > cuts[2] == 1


def resplit(config: Any, planned: PlannedRun, budget: int, num_ranks: int) -> Any:
    store, settings = planned.store, {"seed": config.seed, "num_ranks": num_ranks}
    return make_plan(store.lengths, store.num_label_tokens, config.batch, micro_batch_tokens=budget, **settings)


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_summed_over_ranks_equals_one_rank(tiny, tmp_path, num_ranks):
    """Seven ranks for six samples: one rank has nothing to do. Each rank's part is computed in turn, then summed."""
    config = tiny.config(tmp_path, model={"name": str(tiny.model_dir), "precision": "fp64"})
    run, planned = make_run(config)
    wake_adapter(run)
    loss, expected = padded_reference(run, planned, planned.plan.step(0))
    step = resplit(config, planned, 640, num_ranks).step(0)
    assert sorted(step.sample_ids) == sorted(planned.plan.step(0).sample_ids)
    run.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for index in range(num_ranks):
        run = replace(run, rank=Rank(index, num_ranks))
        total += accumulate_gradients(run, step)[0]
    assert total.item() / step.num_label_tokens == pytest.approx(loss, rel=1e-12)
    assert ((gradients(run) - expected).norm() / expected.norm()).item() < 1e-12


def test_tied_embedding_gets_the_gradient_of_both_uses(tiny, tmp_path):
    config = tiny.config(tmp_path, method="full", model={"name": str(tiny.model_dir), "precision": "fp64"})
    run, planned = make_run(config)
    embedding = run.model.get_input_embeddings().weight
    assert embedding is run.model.get_output_embeddings().weight
    assert sum(parameter is embedding for parameter in run.parameters) == 1
    step = planned.plan.step(0)
    padded_reference(run, planned, step)
    both = embedding.grad.clone()
    run.optimizer.zero_grad(set_to_none=True)
    accumulate_gradients(run, step)
    assert torch.allclose(embedding.grad, both, rtol=1e-10, atol=1e-14)
    unseen = sorted(
        set(range(len(embedding))) - {i for s in step.sample_ids for i in planned.store.sample(s).token_ids.tolist()}
    )
    # a token that is never read still has a gradient: the head's softmax pushes it down
    assert embedding.grad[unseen].abs().sum() > 0


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e3])
def test_grad_norm_and_clipping_equal_the_formula(tiny, tmp_path, max_grad_norm, is_fused, monkeypatch):
    """Fused optimizers, which a GPU has, clip while they read the gradients."""
    if is_fused:
        monkeypatch.setattr(
            build, "make_optimizer", lambda named, config, **_: torch.optim.SGD(named.values(), lr=1.0, fused=True)
        )
    config = tiny.config(
        tmp_path,
        model={"name": str(tiny.model_dir), "precision": "fp64"},
        optim={"name": "sgd", "beta1": 0.0, "lr": 1.0, "max_grad_norm": max_grad_norm},
        schedule={"kind": "constant", "warmup_steps": 0},
    )
    run, planned = make_run(config)
    wake_adapter(run)
    _, expected = padded_reference(run, planned, planned.plan.step(0))
    before = torch.cat([p.detach().reshape(-1) for p in run.parameters]).clone()
    outcome = launch_step(run, planned.plan.step(0))()
    assert outcome is not None
    assert outcome.grad_norm == pytest.approx(expected.norm().item(), rel=1e-12)
    moved = before - torch.cat([p.detach().reshape(-1) for p in run.parameters])
    clipped = expected * min(1.0, max_grad_norm / (expected.norm().item() + 1e-6))
    # fused optimizers get the factor in fp32
    assert ((moved - clipped).norm() / clipped.norm()).item() < (1e-6 if is_fused else 1e-10)
    gradient = torch.cat([p.grad.reshape(-1) for p in run.parameters if p.grad is not None])
    assert ((gradient - clipped).norm() / clipped.norm()).item() < (1e-6 if is_fused else 1e-10)


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_evaluation_equals_training_loss_without_dropout_and_disturbs_nothing(tiny, tmp_path, dropout):
    """The held-out loss is one number whatever the micro-batches; it moves no gradient, weight or random state.

    It has no noise on embeddings, label smoothing and z-loss. Without dropout the layers are fused, and read the
    changed adapter only after a refresh.
    """
    config = tiny.config(
        tmp_path,
        model={"name": str(tiny.model_dir), "precision": "fp64", "neftune_alpha": 5.0},
        lora={"rank": 4, "dropout": dropout},
        objective={"label_smoothing": 0.1, "z_loss": 0.1},
        eval={"fraction": 0.2},
    )
    run, planned = make_run(config)
    wake_adapter(run)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    total, _ = evaluate(run, WorstSamples(run))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None or not p.grad.any() for p in run.parameters)
    assert run.model.training
    held_out = planned.eval_sets[0].step.sample_ids
    assert not set(held_out) & {i for step in planned.plan.steps() for i in step.sample_ids}
    run.model.eval()
    run.fused_lora.refresh()
    with torch.no_grad():
        expected, correct, count = 0.0, 0, 0
        for sample_id in held_out:
            ids, loss_mask = planned.store.sample(sample_id).pair
            document = {"cu_seq_lens_q": torch.tensor([0, len(ids)], dtype=torch.int32), "max_length_q": len(ids)}
            row = torch.tensor(ids.tolist())
            positions = torch.arange(len(ids))[None]
            logits = run.model(input_ids=row[None], position_ids=positions, use_cache=False, **document).logits[0, :-1]
            keep = torch.tensor(loss_mask.tolist())[1:]
            expected += F.cross_entropy(logits[keep], row[1:][keep], reduction="sum").item()
            correct += int((logits[keep].argmax(-1) == row[1:][keep]).sum())
            count += int(keep.sum())
    assert total.loss == pytest.approx(expected / count, rel=1e-12)
    assert (total.token_accuracy, total.num_label_tokens) == (correct / count, count)


def test_a_step_without_labels_updates_nothing(tiny, tmp_path):
    run, planned = make_run(tiny.config(tmp_path, method="full"))
    step = planned.plan.step(0)
    empty = StepPlan(0, 0, step.sample_ids, step.num_tokens, 0, step.by_rank, step.balance)
    before = [parameter.detach().clone() for parameter in run.parameters]
    outcome = launch_step(run, empty)()
    assert outcome is not None
    assert outcome.skipped == "no label tokens"
    assert [rank["peak_memory_bytes"] > 0 for rank in outcome.rank_figures] == [True]
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters, strict=True))
    run.progress.advance(empty, updated=outcome.skipped is None, num_naive_tokens=0)
    assert (run.progress.step, run.progress.num_updates) == (1, 0)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_stop_is_heard_in_a_step_without_labels(tiny, tmp_path, update):
    config = tiny.config(
        tmp_path, method="full", full={"update": update}, optim={"max_grad_norm": None},
        batch={"samples_per_step": 4, "micro_batch_tokens": 4000},
    )  # fmt: skip
    run, planned = make_run(config)
    empty = replace(planned.plan.step(0), num_label_tokens=0)
    launch = step_launcher(run)
    outcome = launch(empty)()
    assert outcome is not None
    assert outcome.skipped == "no label tokens"
    run.stop.number = signal.SIGTERM
    assert launch(empty)() is None


def test_frozen_weights_and_their_states_never_change(tiny, tmp_path):
    run, planned = make_run(tiny.config(tmp_path))
    trained = {id(parameter) for parameter in run.named_parameters.values()}
    frozen = [p for p in run.model.parameters() if id(p) not in trained]
    before = [parameter.clone() for parameter in frozen]
    for step in planned.plan.steps():
        launch_step(run, step)()
    assert frozen
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, frozen, strict=True))
    assert set(run.optimizer.state) == set(run.parameters)


def test_dropout_differs_by_position_and_repeats_with_it(tiny, tmp_path):
    config = tiny.config(tmp_path, lora={"rank": 4, "dropout": 0.5}, optim={"lr": 1e-30})
    run, planned = make_run(config)
    wake_adapter(run)
    step = planned.plan.step(0)

    def loss_of(index: int, rank: int) -> float:
        moved = StepPlan(index, 0, step.sample_ids, step.num_tokens, step.num_label_tokens, step.by_rank * 2, 1.0)
        return accumulate_gradients(replace(run, rank=Rank(rank, 2)), moved)[0].item()

    losses = [loss_of(index, rank) for index, rank in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def embeddings_of(run: TrainingRun, step: StepPlan) -> Tensor:
    """What the first layer gets of each token of a step, in the order of its samples."""
    passes: list[Tensor] = []
    first = run.model.get_decoder().layers[0]
    with first.register_forward_pre_hook(lambda _, args: passes.append(args[0].detach())):
        accumulate_gradients(run, step)
    parts = {}
    for micro_batch, embedded in zip(step.by_rank[0], passes, strict=True):
        lengths = [len(run.planned.store.sample(i).token_ids) for i in micro_batch.sample_ids]
        rows = embedded[0].split([*lengths, embedded.shape[1] - sum(lengths)])
        parts |= dict(zip(micro_batch.sample_ids, rows, strict=False))
    return torch.cat([parts[i] for i in step.sample_ids])


def test_noise_on_embeddings_is_of_a_token_whatever_the_cut(tiny, tmp_path):
    model = {"name": str(tiny.model_dir), "precision": "fp64", "neftune_alpha": 5.0}
    config = tiny.config(tmp_path, model=model, batch={"samples_per_step": 20, "micro_batch_tokens": 700})
    run, planned = make_run(config)
    wake_adapter(run)
    step, table = planned.plan.step(0), run.model.get_input_embeddings().weight
    cuts = [resplit(config, planned, budget, num_ranks=1).step(0) for budget in (600, 100_000)]
    assert [len(cut.by_rank[0]) > 1 for cut in cuts] == [True, False]
    embedded, sums, found = [], [], []
    for cut in cuts:
        run.optimizer.zero_grad(set_to_none=True)
        sums.append(accumulate_gradients(run, cut)[0].item())
        found.append(gradients(run))
        embedded.append(embeddings_of(run, replace(cut, sample_ids=step.sample_ids)))
    assert torch.equal(*embedded)
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    assert ((found[0] - found[1]).norm() / found[1].norm()).item() < 1e-12
    samples = [planned.store.sample(i).token_ids.tolist() for i in step.sample_ids]
    noise = embedded[0] - table[[token for ids in samples for token in ids]]
    # uniform(-1, 1) times the scale of each sample, of which the mean is 0 and the variance 1/3
    scale = torch.cat([torch.full((len(ids), 1), 5 / (len(ids) * table.shape[1]) ** 0.5) for ids in samples])
    values = noise / scale
    assert values.abs().max() < 1
    assert values.mean().item() == pytest.approx(0, abs=0.02)
    assert values.var().item() == pytest.approx(1 / 3, rel=0.02)
    assert len(values.unique()) > 0.99 * values.numel()
    assert not torch.equal(embedded[0], embeddings_of(run, replace(cuts[0], index=1, sample_ids=step.sample_ids)))
    config = config.model_copy(update={"seed": config.seed + 1})
    assert not torch.equal(embedded[0], embeddings_of(replace(run, config=config), cuts[0]))


def test_linear_layers_are_the_only_thing_lora_trains(tiny, tmp_path):
    run, _ = make_run(tiny.config(tmp_path))
    num_linear = sum(isinstance(module, nn.Linear) for module in run.model.get_decoder().modules())
    assert len(run.named_parameters) == 2 * num_linear


def test_cutting_a_sample_changes_no_loss_of_what_is_kept(tiny, tmp_path):
    """Built at 500 and at 60 tokens: every kept label token has the same loss, to the bit of the arithmetic."""
    model = {"name": str(tiny.model_dir), "precision": "fp64"}
    whole, planned = make_run(tiny.config(tmp_path, model=model))
    short_data = {
        "name": "short",
        "root": str(tmp_path / "data"),
        "max_tokens": 60,
        "too_long": "truncate",
        "on_bad_row": "skip",
    }
    short = open_and_plan(tiny.config(tmp_path, model=model, data=short_data), Reporter(), Rank())
    whole.model.eval()
    num_cut = 0
    for index in range(short.store.num_samples):
        ids, loss_mask = short.store.sample(index).pair
        origin = short.store.origin(index)
        twin = next(i for i in range(planned.store.num_samples) if planned.store.origin(i) == origin)
        all_ids, all_trained = planned.store.sample(twin).pair
        num_cut += len(ids) < len(all_ids)
        assert ids.tolist() == all_ids[: len(ids)].tolist()
        assert loss_mask.tolist() == all_trained[: len(ids)].tolist()
        if index < 12:
            kept = packed_cross_entropy(whole.model, flatten_samples([(ids, loss_mask)])).loss_sum
            marked = all_trained.copy()
            marked[len(ids) :] = False
            expected = packed_cross_entropy(whole.model, flatten_samples([(all_ids, marked)])).loss_sum
            assert kept.item() == pytest.approx(expected.item(), rel=1e-12)
    assert num_cut > 20
