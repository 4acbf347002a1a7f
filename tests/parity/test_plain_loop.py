"""The whole spine against a plain transformers + PEFT loop that shares none of its code, on the same batches."""

from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from plain_pictures import start_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM

from flatout.parallel.rank import Rank
from flatout.track.callback import Reporter
from flatout.trainer.planned_run import open_and_plan
from flatout.trainer.run import train
from tests.usual import usual

NUM_STEPS = 200
SOME = 60


def padded_batch(samples: list[tuple[Any, Any]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids, attention mask and labels (-100 without loss), each (B, longest)."""
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.full((len(samples), longest), pad_id)
    mask = torch.zeros((len(samples), longest), dtype=torch.long)
    labels = torch.full((len(samples), longest), -100)
    for row, (tokens, loss_mask) in enumerate(samples):
        tokens, loss_mask = torch.tensor(tokens.tolist()), torch.tensor(loss_mask.tolist())
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(loss_mask, tokens, -100)
    return ids, mask, labels


def plain_losses(
    model: torch.nn.Module,
    batches: Iterator[tuple[Tensor, Tensor, Tensor]],
    num_steps: int,
    *,
    lr: float,
    weight_decay: float,
) -> Iterator[float]:
    """Sixty lines of the field's textbook: pad, forward, mean over label tokens, clip, AdamW, linear decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / num_steps)
    for ids, mask, labels in batches:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        yield loss.item()


# method and steps -> what the loss falls to at least
CASES = {("lora", SOME): 0.99, ("full", SOME): 0.95, ("lora", NUM_STEPS): 0.98, ("full", NUM_STEPS): 0.75}


@pytest.mark.parametrize(("method", "num_steps"), usual(CASES, list(CASES)[:2]))
def test_200_steps_equal_a_plain_loop(tiny, tmp_path, metrics_of, method, num_steps):
    config = tiny.config(
        tmp_path / "run",
        method=method,
        batch={"samples_per_step": 2, "micro_batch_tokens": 640, "max_steps": num_steps},
        optim={"lr": 3e-3 if method == "lora" else 1e-3, "weight_decay": 0.01},
        schedule={"kind": "linear", "warmup_steps": 0},
    )
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32, attn_implementation="eager")
    if method == "lora":
        planned = start_adapter(config, tmp_path / "start")
        model = peft.PeftModel.from_pretrained(model, str(tmp_path / "start"), is_trainable=True)
    else:
        planned = open_and_plan(config, Reporter(), Rank())
    model.train()
    batches = (
        padded_batch([planned.store.sample(i).pair for i in step.sample_ids], model.config.pad_token_id)
        for step in planned.plan.steps()
    )
    expected = list(plain_losses(model, batches, num_steps, lr=config.optim.lr, weight_decay=0.01))
    train(config)
    got = [record["loss"] for record in metrics_of(tmp_path / "run")]
    assert len(got) == num_steps
    worst = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
    assert worst < 1e-4, f"worst relative difference {worst:.2e}"
    # a vacuous pass is impossible: the loss has to fall
    start, end = sum(got[:20]) / 20, sum(got[-20:]) / 20
    assert end < CASES[method, num_steps] * start
    print(f"{method}: worst relative difference over {num_steps} steps {worst:.2e}, loss {got[0]:.3f} -> {got[-1]:.3f}")
