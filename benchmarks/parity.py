"""The parity gate: 200 LoRA steps on real rows beside a plain fp32 transformers + PEFT loop, for every kind of base.

    python benchmarks/parity.py --rows alpaca.json --tokenizer QWEN3_TOKENIZER_DIR --out parity

First flatout trains a small model whole, so that losses mean something. Then each mode gets a process of its own: the
gradient of every adapter tensor at step 1, then the loss curve, against a reference in fp32 throughout whose frozen
weights are the mode's own, dequantized. Both start from one adapter with B not zero (with B = 0 A has no gradient).
Writes parity.json (`green` by mode, read by `python -m benchmarks.bench --parity`) with all loss curves, and parity.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench.shapes import SHAPES
from torch import Tensor

from flatout.config.read import make_config
from flatout.config.schema import Config

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# mode: base section, largest mean relative difference of the loss, least cosine of any adapter tensor's gradient
MODES: dict[str, tuple[dict[str, str], float, float]] = {
    "bf16": ({}, 0.005, 0.999),
    "bf16-fp8-backward": ({"backward": "fp8"}, 0.01, 0.98),
    "fp8": ({"storage": "fp8"}, 0.01, 0.98),
    "nf4": ({"storage": "nf4"}, 0.01, 0.999),
    "nf4-fp8": ({"storage": "nf4", "compute": "fp8"}, 0.01, 0.98),
}
# few at once: four references share the GPU, each with the logits of all its tokens in fp32
REFERENCE_ROWS = 8


def config_of(args: argparse.Namespace, name: str, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "run_dir": str(args.work / name),
        "data": {"name": "rows", "root": str(args.work / "data"), "tokenizer": str(args.tokenizer),
                 "sources": [{"path": str(args.rows)}], "max_tokens": 512},
        "checkpoint": {"every_steps": None, "resume": "never"},
    }  # fmt: skip
    return make_config({**values, **sections})


def lora_config(args: argparse.Namespace, mode: str) -> Config:
    base = MODES[mode][0]
    return config_of(
        args,
        f"lora-{mode}-{time.time_ns()}",
        model={"name": str(args.work / "base" / "final")},
        lora={"rank": 16, "alpha": 16.0, "targets": TARGETS, "continue_from": str(args.work / "adapter")},
        batch={"samples_per_step": 16, "micro_batch_tokens": args.budget, "max_steps": args.steps},
        optim={"lr": args.lr},
        schedule={"kind": "constant", "warmup_steps": 0},
        **({"base": base} if base else {}),
    )


def prepare(args: argparse.Namespace) -> None:
    """The model: random, trained whole by flatout; and the adapter that both sides start from."""
    import peft
    from transformers import AutoModelForCausalLM

    from flatout.data.tokenizer import load_tokenizer
    from flatout.trainer.run import train

    args.work.mkdir(parents=True, exist_ok=True)
    shape = dict(SHAPES[args.shape])
    shape["vocab_size"] = max(shape["vocab_size"], len(load_tokenizer(str(args.tokenizer))))
    (args.work / "shape").mkdir(exist_ok=True)
    (args.work / "shape" / "config.json").write_text(json.dumps(shape))
    train(
        config_of(
            args,
            "base",
            method="full",
            model={"name": str(args.work / "shape"), "init": "random"},
            batch={"samples_per_step": 32, "micro_batch_tokens": args.budget, "max_steps": args.pretrain_steps},
            optim={"lr": 6e-4},
            schedule={"kind": "cosine", "warmup_steps": min(20, args.pretrain_steps - 1)},
        )
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.work / "base" / "final", dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    model.save_pretrained(args.work / "adapter")


def measure(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Ours and the reference in this process: gradients at step 1, then both loss curves."""
    from flatout.checkpoint.write import Checkpoints
    from flatout.models.lora.layer import lora_layers
    from flatout.parallel.rank import Rank
    from flatout.track.callback import Reporter
    from flatout.trainer.build import build_run
    from flatout.trainer.planned_run import open_and_plan
    from flatout.trainer.run import train
    from flatout.trainer.state import Setup
    from flatout.trainer.step import accumulate_gradients
    from flatout.trainer.steps_and_memory import gpu_of

    config = lora_config(args, mode)
    rank = Rank()
    planned = open_and_plan(config, Reporter(), rank, gpu_of(config, rank))
    checkpoints = Checkpoints(config.folder, keep=1, on_event=lambda kind, facts: None)
    run = build_run(Setup(config, planned, checkpoints, Reporter(), rank))
    accumulate_gradients(run, planned.plan.step(0))
    ours_gradient, weights = adapter_gradient(run.model), base_weights(run.model)
    bases = Counter(type(layer.base).__name__ for layer in lora_layers(run.model).values())
    device = run.device
    del run
    reference = make_reference(args, weights, device)
    del weights
    batches = reference_batches(planned, device)
    reference_losses, reference_gradient = reference_run(reference, batches, args.lr)
    del reference
    config = lora_config(args, mode)
    train(config)
    records = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    if set(ours_gradient) != set(reference_gradient):
        raise SystemExit(f"other adapter tensors: {sorted(set(ours_gradient) ^ set(reference_gradient))[:3]}")
    cosines = {
        name: F.cosine_similarity(
            gradient.double().flatten(), reference_gradient[name].double().flatten(), dim=0
        ).item()
        for name, gradient in ours_gradient.items()
    }
    return {"losses": losses, "reference": reference_losses, "cosines": cosines, "bases": bases}


def adapter_gradient(model: Any) -> dict[str, Tensor]:
    """PEFT's tensor names to our gradients, on the CPU."""
    from flatout.models.lora.layer import lora_layers

    return {
        f"base_model.model.{name}.{suffix}.weight": parameter.grad.float().cpu()
        for name, layer in lora_layers(model).items()
        for suffix, parameter in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b))
        if parameter.grad is not None
    }


def base_weights(model: Any) -> dict[str, Tensor]:
    """What the frozen weights under the adapters stand for, in fp32 on the CPU."""
    from flatout.models.lora.layer import lora_layers

    return {f"{name}.weight": layer.base.weight.detach().float().cpu() for name, layer in lora_layers(model).items()}


def make_reference(args: argparse.Namespace, weights: dict[str, Tensor], device: torch.device) -> Any:
    """transformers' own model in fp32 with these frozen weights, PEFT's own adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(
        args.work / "base" / "final", dtype=torch.float32, attn_implementation="sdpa"
    )
    model.load_state_dict(weights, strict=False)
    model = peft.PeftModel.from_pretrained(model, str(args.work / "adapter"), is_trainable=True)
    return model.to(device).train()


def reference_batches(planned: Any, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The plan's samples of each step, right-padded: ids, attention mask and labels, each (B, longest)."""
    for step in planned.plan.steps():
        samples = [planned.store.sample(index).pair for index in step.sample_ids]
        longest = max(len(ids) for ids, _ in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, (tokens, loss_mask) in enumerate(samples):
            tokens, loss_mask = torch.tensor(tokens.tolist()), torch.tensor(loss_mask.tolist())
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            labels[row, : len(tokens)] = torch.where(loss_mask, tokens, -100)
        yield ids.to(device), mask.to(device), labels.to(device)


def reference_run(
    model: Any, batches: Iterator[tuple[Tensor, Tensor, Tensor]], lr: float
) -> tuple[list[float], dict[str, Tensor]]:
    """The textbook loop: mean over the step's label tokens, clip to 1, AdamW. Losses, and the gradient of step 1."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, weight_decay=0.0)
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    for ids, mask, labels in batches:
        total = torch.zeros((), device=ids.device)
        num_labels = (labels[:, 1:] != -100).sum()
        for part in range(0, len(ids), REFERENCE_ROWS):
            rows = slice(part, part + REFERENCE_ROWS)
            logits = model(input_ids=ids[rows], attention_mask=mask[rows], use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten(), reduction="sum") / num_labels
            loss.backward()
            total += loss.detach()
        if not losses:
            first = {name.replace(".default", ""): p.grad.float().cpu() for name, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses).tolist(), first


def verdict(mode: str, found: dict[str, Any]) -> dict[str, Any]:
    """The figures the gate looks at, and whether it is green."""
    pairs = list(zip(found["losses"], found["reference"], strict=True))
    cosines = list(found["cosines"].values())
    _, most_difference, least_cosine = MODES[mode]
    facts = {
        "mean_difference": sum(abs(a - b) / b for a, b in pairs) / len(pairs),
        "worst_difference": max(abs(a - b) / b for a, b in pairs),
        "least_cosine": min(cosines),
        "mean_cosine": sum(cosines) / len(cosines),
        "first_loss": pairs[0][1],
        "last_loss": pairs[-1][1],
        "bases": found["bases"],
    }
    facts["green"] = facts["mean_difference"] < most_difference and facts["least_cosine"] > least_cosine
    return facts


def table(verdicts: dict[str, dict[str, Any]]) -> str:
    columns = "mode|frozen layers|reference's loss|mean (worst) difference|asked|least (mean) cosine|asked|gate"
    rows = [f"| {columns.replace('|', ' | ')} |", "|---" * 8 + "|"]
    for mode, v in verdicts.items():
        _, most, least = MODES[mode]
        cells = (
            mode,
            ", ".join(f"{count} {kind}" for kind, count in v["bases"].items()),
            f"{v['first_loss']:.4f} -> {v['last_loss']:.4f}",
            f"{v['mean_difference']:.3%} ({v['worst_difference']:.3%})",
            f"< {most:.1%}",
            f"{v['least_cosine']:.5f} ({v['mean_cosine']:.5f})",
            f"> {least}",
            "green" if v["green"] else "RED",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def report(args: argparse.Namespace) -> bool:
    """Verdicts of all modes measured so far, from the work folder, into the out folder."""
    found = {mode: json.loads(path.read_text()) for mode in MODES if (path := args.work / f"{mode}.json").exists()}
    verdicts = {mode: verdict(mode, facts) for mode, facts in found.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    content = {
        "shape": args.shape,
        "steps": args.steps,
        "rows": args.rows.name,
        "green": {mode: v["green"] for mode, v in verdicts.items()},
        "verdicts": verdicts,
        "curves": {mode: {"ours": f["losses"], "reference": f["reference"]} for mode, f in found.items()},
    }
    (args.out / "parity.json").write_text(json.dumps(content))
    (args.out / "parity.md").write_text(table(verdicts))
    print(table(verdicts), flush=True)
    return bool(verdicts) and all(v["green"] for v in verdicts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("parity"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/parity"))
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pretrain-steps", type=int, default=200)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows, args.tokenizer, args.out, args.work = (
        path.resolve() for path in (args.rows, args.tokenizer, args.out, args.work)
    )
    if args.part == "prepare":
        prepare(args)
    elif args.part:
        (args.work / f"{args.part}.json").write_text(json.dumps(measure(args, args.part)))
    else:
        if not (args.work / "adapter").exists():
            run_parts(["prepare"])
        # nothing is timed, so all modes share the GPU
        run_parts(args.modes.split(","))
        sys.exit(0 if report(args) else 1)


def run_parts(parts: list[str]) -> None:
    """Run parts at once, each in a process of its own, and wait for all."""
    started = time.perf_counter()
    running = {part: subprocess.Popen([sys.executable, *sys.argv, "--part", part]) for part in parts}
    for part, process in running.items():
        print(f"{part}: exit {process.wait()}, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
