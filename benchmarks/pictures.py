"""Training on pictures beside transformers' Trainer and PEFT, TRL and Unsloth: tokens and pictures a second.

    python benchmarks/pictures.py --shape qwen3-vl-8b --peer-path /tmp/trl --peer-path /tmp/fa_shim
    python benchmarks/pictures.py --shape qwen3-vl-8b --rows unsloth,bf16 --peer-path /tmp/unsloth
    python benchmarks/pictures.py --shape qwen3-vl-8b --rows bf16,fp8 --gpus 4                 # the same step on four
    python benchmarks/pictures.py --shape tiny --steps 1 --samples 8 --peer-path ... device=cpu compile=off   # on a CPU

Every trainer gets the same shape with random weights, LoRA of rank 16 on all linears of the decoder, and the same rows:
none to four pictures of 224 to 1,536 pixels a side, with questions and answers of random letters. Labels are the
answers. Rows, each in a fresh process:

    bf16, fp8   flatout, packed
    trainer     transformers' Trainer with PEFT: first one step of each of TRIALS, then `--steps` of the fastest
    trl         TRL's SFTTrainer, in the same way
    unsloth     Unsloth's FastVisionModel, in the same way, with its own checkpointing

Peers pad, take attention from FlashAttention-2 and their fused head from Liger where they are installed, and read
pictures in worker processes. `--peer-path` folders are for the peers' processes alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.figures import WARMUP_STEPS
from bench.machine import gpu_header, gpu_memory, versions
from bench.parts import run_part, telling
from bench.shapes import SHAPES, shape_config
from bench.steps import take_steps
from peers.peer_trainer import RANK, TARGETS

from flatout.config.read import make_config
from flatout.parallel.rank import Rank
from flatout.planner.memory.sizes import MicroBatchSize
from flatout.profile.profiler import Profiler
from flatout.track.callback import Callback, MemoryCallback, Reporter
from flatout.track.console import ConsoleCallback
from flatout.trainer.state import TrainingRun

OURS: dict[str, list[str]] = {"bf16": [], "fp8": ["base.storage=fp8"]}
PEERS = ("trainer", "trl", "unsloth")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = {
    "qwen3-vl-8b": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24], "num_position_embeddings": 2304, "patch_size": 16,
    },
    "tiny": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64, "patch_size": 16,
    },
}  # fmt: skip
TEXT = {"qwen3-vl-8b": "qwen3-8b", "tiny": "tiny"}
NUM_WORKERS = min(12, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Trial:
    """How a peer is run: samples a micro-batch, and gradient checkpointing."""

    samples: int
    checkpointing: bool

    def __str__(self) -> str:
        return f"{self.samples} samples{', checkpointing' * self.checkpointing}"


TRIALS = [Trial(1, False), Trial(2, False), Trial(4, True), Trial(8, True)]


def write_picture(path: Path, rng: np.random.Generator) -> None:
    """A JPEG of smooth colors with some noise, each side of 224 to 1,536 pixels."""
    from PIL import Image

    width, height = np.exp(rng.uniform(np.log(224), np.log(1536), 2)).astype(int)
    coarse = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), np.uint8)
    Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC).save(path, quality=88)


def letters(rng: np.random.Generator, mean: float) -> str:
    """Text of random letters and spaces; each is one token."""
    count = int(np.clip(rng.lognormal(np.log(mean), 0.7), 8, 1500))
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz    "), count))


def write_rows(folder: Path, num_rows: int) -> int:
    """Write so many rows and their pictures; return how many pictures there are."""
    rng, number = np.random.default_rng(0), 0
    (folder / "pictures").mkdir(parents=True)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(num_rows):
            parts: list[dict[str, str]] = []
            for _ in range(int(rng.integers(0, 5))):
                path = folder / "pictures" / f"{number}.jpg"
                write_picture(path, rng)
                parts.append({"type": "image", "path": str(path)})
                number += 1
            user = [*parts, {"type": "text", "text": letters(rng, 120)}]
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": letters(rng, 180)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return number


def write_model(folder: Path, name: str) -> None:
    """The shape's config, a tokenizer with a token for each byte, and the processor; no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: place for place, word in enumerate([*SPECIAL, *alphabet])}
    raw = Tokenizer(models.BPE(words, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    text = {key: value for key, value in shape_config(TEXT[name]).items() if key not in ("model_type", "architectures")}
    rotated = text["head_dim"] // 2
    sections = [rotated - 2 * (rotated * 5 // 16), rotated * 5 // 16, rotated * 5 // 16]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    vision = {"out_hidden_size": text["hidden_size"], "spatial_merge_size": 2, "temporal_patch_size": 2, **VISION[name]}
    ids = {f"{kind}_token_id": words[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    ids |= {f"vision_{end}_token_id": words[f"<|vision_{end}|>"] for end in ("start", "end")}
    Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"], **ids,
    ).save_pretrained(folder)  # fmt: skip
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }  # fmt: skip
    written = {"processor_class": "Qwen3VLProcessor", "image_processor": images}
    (folder / "processor_config.json").write_text(json.dumps(written))


def ours(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Steps of flatout."""
    values = {
        "run_dir": str(args.out / "run"),
        "model": {"name": str(args.out / "model"), "init": "random"},
        "data": {"name": "pictures", "root": str(args.out / "data"),
                 "sources": [{"path": str(args.out / "rows.jsonl")}], "max_tokens": 16384},
        "batch": {"samples_per_step": args.samples, "max_steps": WARMUP_STEPS + args.steps, "shuffle": False},
        "optim": {"lr": 1e-4},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": None},
        "lora": {"rank": RANK, "alpha": float(RANK)},
    }  # fmt: skip
    recorder, found = MemoryCallback(), dict[str, Any]()

    def after(run: TrainingRun) -> None:
        found.update(gpu_memory())
        if run.memory.model is not None:
            batches = [batch for step in run.plan.steps() for batch in step.by_rank[0]]
            largest = max(batches, key=lambda batch: batch.num_tokens)
            size = MicroBatchSize(largest.num_tokens, largest.num_label_tokens, len(largest.sample_ids))
            planned = run.memory.model.estimate(size, run.memory.recompute, accumulates=run.memory.accumulates)
            found.update(planned_gib=planned.total_bytes / 2**30, largest_micro_batch=largest.num_tokens)

    config = make_config(values, [*OURS[row], *args.overrides])
    callbacks: list[Callback] = [ConsoleCallback(), recorder]
    if args.profile:
        config.folder.mkdir(parents=True, exist_ok=True)
        callbacks.append(Profiler(config.folder, args.profile, print))
    run = take_steps(config, Reporter(*callbacks), after=after)
    timed = recorder.steps[WARMUP_STEPS:]
    seconds = sum(step.step_s for step in timed)
    return {
        **found,
        "tokens_per_s": sum(step.num_tokens for step in timed) / seconds,
        "pictures_per_s": args.timed_pictures / seconds,
        "num_tokens": [step.num_tokens for step in recorder.steps],
        "steps_s": [round(step.step_s, 3) for step in recorder.steps],
        "data_wait_share": sum(step.data_wait_s for step in timed) / seconds,
        "launch_to_first_step_s": recorder.step_times_s[0] - args.launched_s,
        "mfu": timed[-1].mfu,
        "recompute": run.memory.recompute,
        "micro_batches": [step.num_micro_batches for step in timed],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "stages": [f"{name} {text}" for _, name, text in recorder.stages],
    }


def processor_of(folder: Path) -> Any:
    """Transformers' own processor; without the part for videos where its package is not installed."""
    import transformers

    class WithoutVideos(transformers.Qwen3VLProcessor):  # type: ignore[misc, name-defined]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    try:
        images = transformers.AutoImageProcessor.from_pretrained(folder)
    except ImportError:
        images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return WithoutVideos(images, tokenizer, None, chat_template=tokenizer.chat_template)


class Answers:
    """Makes a batch of rows as transformers' examples do: pictures and text to the processor, labels of answers."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        from PIL import Image

        apply, every = self._processor.tokenizer.apply_chat_template, [row["messages"] for row in rows]
        images = [
            Image.open(part["path"]).convert("RGB")
            for messages in every for part in messages[0]["content"] if part["type"] == "image"
        ]  # fmt: skip
        texts = [apply(messages, tokenize=False) for messages in every]
        batch = dict(self._processor(text=texts, images=images or None, padding=True, return_tensors="pt"))
        answers = [len(messages[1]["content"]) + 2 for messages in every]  # with the end of the turn
        ends = batch["attention_mask"].sum(1)
        place = torch.arange(batch["input_ids"].shape[1])
        is_label = (place >= (ends - torch.tensor(answers))[:, None]) & (place < ends[:, None])
        return batch | {"labels": batch["input_ids"].masked_fill(~is_label, -100)}


class Peer:
    """A peer's trainer on one model, which each trial gets with a fresh adapter."""

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        self.args, self.kind, self.cuda = args, kind, torch.cuda.is_available()
        self.rows = [json.loads(line) for line in (args.out / "rows.jsonl").read_text().splitlines()]
        self.processor = processor_of(args.out / "model")
        self.processor.tokenizer.padding_side = "right"
        self.trainer: Any = None
        self.model = self._unsloth() if kind == "unsloth" else self._random()

    def _random(self) -> Any:
        from transformers import AutoConfig, AutoModelForImageTextToText

        torch.manual_seed(0)
        attention = "sdpa"
        if self.cuda:
            try:
                import flash_attn  # noqa: F401

                attention = "flash_attention_2"
            except ImportError:
                print("no flash_attn: sdpa", flush=True)
        with torch.device("cuda" if self.cuda else "cpu"):
            return AutoModelForImageTextToText.from_config(
                AutoConfig.from_pretrained(self.args.out / "model"), dtype=torch.bfloat16, attn_implementation=attention
            )

    def _unsloth(self) -> Any:
        from unsloth import FastVisionModel

        folder = self.args.out / "unsloth"
        if not (folder / "config.json").exists():
            shutil.copytree(self.args.out / "model", folder)
            self._random().save_pretrained(folder, max_shard_size="4GB")
            gc.collect()
            torch.cuda.empty_cache()
        model, _ = FastVisionModel.from_pretrained(
            str(folder), max_seq_length=16384, dtype=torch.bfloat16, load_in_4bit=False,
            use_gradient_checkpointing="unsloth",
        )  # fmt: skip
        return FastVisionModel.get_peft_model(
            model, finetune_vision_layers=False, finetune_language_layers=True, finetune_attention_modules=True,
            finetune_mlp_modules=True, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", random_state=0,
        )  # fmt: skip

    def measure(self, trial: Trial, num_steps: int) -> dict[str, Any]:
        """One warm-up step and so many timed ones; `error` if the memory does not do."""
        found: dict[str, Any] = {"trial": str(trial)}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            found |= self._train(trial, num_steps)
        # out of memory, or a kernel that does not run here
        except (RuntimeError, ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
            found["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        found |= gpu_memory()
        self._forget()
        return found

    def _forget(self) -> None:
        if self.trainer is not None and self.kind != "unsloth":
            self.model = self.trainer.model.unload()
            self.model.__dict__.pop("forward", None)
            self.model.gradient_checkpointing_disable()
        self.trainer = None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _train(self, trial: Trial, num_steps: int) -> dict[str, Any]:
        from peft import LoraConfig, get_peft_model
        from transformers import Trainer, TrainerCallback, TrainingArguments

        ends_s: list[float] = []

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                ends_s.append(time.perf_counter())

        # the last rows, which are flatout's timed ones; one more step warms up
        rows = self.rows[-(1 + num_steps) * self.args.samples :]
        # of the decoder: the tower's own linears have other names
        adapter = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        options: dict[str, Any] = {
            "output_dir": str(self.args.out / self.kind), "per_device_train_batch_size": trial.samples,
            "gradient_accumulation_steps": self.args.samples // trial.samples, "max_steps": 1 + num_steps,
            "learning_rate": 1e-4, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
            "logging_steps": 1 + num_steps, "report_to": "none", "save_strategy": "no", "bf16": self.cuda,
            "use_cpu": not self.cuda, "gradient_checkpointing": trial.checkpointing, "seed": 0, "disable_tqdm": True,
            "train_sampling_strategy": "sequential", "dataloader_num_workers": NUM_WORKERS,
            "remove_unused_columns": False,
            "use_liger_kernel": self.cuda and self.kind != "unsloth" and has_liger(),
        }  # fmt: skip
        if self.kind == "trl":
            import pyarrow as pa
            from datasets import Dataset, Image, Sequence
            from trl import SFTConfig, SFTTrainer

            # named here, as some versions of dill cannot hash a table
            table = pa.Table.from_pylist([trl_row(row) for row in rows])
            data = Dataset(table, fingerprint=f"rows{len(rows)}").cast_column("images", Sequence(Image()))
            config = SFTConfig(**options, max_length=None)
            self.trainer = SFTTrainer(
                model=self.model, args=config, train_dataset=data, processing_class=self.processor,
                peft_config=adapter, callbacks=[Clock()],
            )  # fmt: skip
        else:
            model = self.model if self.kind == "unsloth" else get_peft_model(self.model, adapter)
            if trial.checkpointing and self.kind != "unsloth":
                model.enable_input_require_grads()
            self.trainer = Trainer(
                model=model, args=TrainingArguments(**options), train_dataset=rows,
                data_collator=Answers(self.processor), callbacks=[Clock()],
            )  # fmt: skip
        self.trainer.train()
        return {
            "train_s": ends_s[-1] - ends_s[0],
            "steps_s": [round(end - before, 3) for before, end in pairwise(ends_s)],
            "attention": self.model.config._attn_implementation,
        }


def has_liger() -> bool:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def trl_row(row: dict[str, Any]) -> dict[str, Any]:
    """As TRL reads it: prompt, completion and images."""
    user, answer = row["messages"]
    parts = [{"type": part["type"], "text": part.get("text")} for part in user["content"]]
    said = [{"type": "text", "text": answer["content"]}]
    return {
        "prompt": [{"role": "user", "content": parts}],
        "completion": [{"role": "assistant", "content": said}],
        "images": [part["path"] for part in user["content"] if part["type"] == "image"],
    }


def peer(args: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure a peer's trials and the fastest of them; each figure is told as soon as it is known."""
    subject, tried = Peer(args, args.part), list[tuple[float, Trial]]()
    fitting = [trial for trial in TRIALS if args.samples % trial.samples == 0]
    trials = [trial for trial in fitting if not args.trials or str(trial) in args.trials]
    if len(trials) == 1:
        tell(subject.measure(trials[0], args.steps))
        return
    for trial in trials:
        if time.time() > args.trials_end_s and tried:
            tell({"left_out": str(trial)})
            continue
        found = subject.measure(trial, 1)
        tell({"is_trial": True, **found})
        if "error" not in found:
            tried.append((found["train_s"], trial))
    if tried:
        tell(subject.measure(min(tried, key=lambda pair: pair[0])[1], args.steps))


def table(results: dict[str, Any], args: argparse.Namespace) -> str:
    """The figures as Markdown: rates and memory of each row, then the ratios."""
    lines, rates = list[str](), dict[str, float]()
    tokens = next((sum(found["num_tokens"][WARMUP_STEPS:]) for found in results.values() if "num_tokens" in found), 0)
    for row in OURS:
        if found := results.get(row):
            rates[f"flatout {row}"] = found["tokens_per_s"]
            lines.append(
                f"| flatout {row} | {found['tokens_per_s']:,.0f} | {found['pictures_per_s']:.1f} | "
                f"{found.get('planned_gib', 0):.1f} | {found.get('peak_allocated_gib', 0):.1f} | {found['recompute']}, "
                f"data waits {found['data_wait_share']:.1%} |"
            )
    for row in PEERS:
        for found in results.get(row, []):
            if "train_s" not in found or found.get("is_trial"):
                continue
            rates[row] = tokens / found["train_s"]
            pictures = args.timed_pictures / found["train_s"]
            peak = found.get("peak_allocated_gib", 0)
            lines.append(f"| {row}, {found['trial']} | {rates[row]:,.0f} | {pictures:.1f} | | {peak:.1f} | |")
    head = (
        f"{args.shape}, {args.samples} samples a step, {args.steps} timed steps of {tokens / args.steps:,.0f} tokens "
        f"and {args.timed_pictures / args.steps:.0f} pictures\n\n"
        "| | tokens/s | pictures/s | planned GiB | peak GiB | |\n| --- | --- | --- | --- | --- | --- |"
    )
    best = max((rates[row] for row in PEERS if row in rates), default=0.0)
    ratios = [f"{name} : the best peer = {rates[name] / best:.2f}" for name in rates if name not in PEERS and best]
    return "\n".join([head, *lines, "", *ratios])


def part(args: argparse.Namespace) -> None:
    """One row, in this process; the first rank tells its figures."""
    if not Rank.from_env().is_first:
        ours(args, args.part)
        return
    with telling(args.part, args.out, hidden=["stages"]) as tell:
        if args.part in PEERS:
            peer(args, tell)
        else:
            tell(ours(args, args.part))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rows, one after another, each in a fresh process."""
    results: dict[str, Any] = {}
    ends_s = time.time() + args.time_limit
    for row in args.rows:
        now_s, is_peer = time.time(), row in PEERS
        words = [f"--trials-end-s={now_s + args.trials_s}", f"--timed-pictures={args.timed_pictures}"]
        paths = args.peer_path if is_peer else ()
        ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}")
        launcher = ranks if args.gpus > 1 and not is_peer else ()
        if figures := run_part(row, words, args.out, left_s=ends_s - now_s, launcher=launcher, paths=paths):
            results[row] = figures if is_peer else figures[0]
    return results


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in VISION if TEXT[name] in SHAPES], default="qwen3-vl-8b")
    names = [*OURS, *PEERS]
    parser.add_argument("--rows", type=lambda text: text.split(","), default=names[:-1], help=f"of {', '.join(names)}")
    parser.add_argument("--trials", type=lambda text: text.split(";"), default=[], help="of peers, as 'A;B' (all)")
    parser.add_argument("--gpus", type=int, default=1, help="for flatout's rows; peers' run on one (1)")
    parser.add_argument("--samples", type=int, default=32, help="samples a step (32)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (5)")
    parser.add_argument("--time-limit", type=float, default=560.0, help="seconds for all rows (560)")
    parser.add_argument("--trials-s", type=float, default=90.0, help="seconds after which a peer tries no more (90)")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="profile N steps of flatout")
    parser.add_argument("--peer-path", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("/tmp/pictures"))
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--launched-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--trials-end-s", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--timed-pictures", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="settings of flatout")
    args = parser.parse_intermixed_args(words)
    if unknown := set(args.rows) - set(names):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; expected some of {', '.join(names)}")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.part:
        part(args)
        return
    shutil.rmtree(args.out, ignore_errors=True)
    write_rows(args.out, (WARMUP_STEPS + args.steps) * args.samples)
    write_model(args.out / "model", args.shape)
    rows = [json.loads(line) for line in (args.out / "rows.jsonl").read_text().splitlines()]
    timed = rows[WARMUP_STEPS * args.samples :]
    args.timed_pictures = sum(part["type"] == "image" for row in timed for part in row["messages"][0]["content"])
    results = measure(args)
    text = table(results, args)
    found = {"gpu": gpu_header(), "versions": versions(), "rows": results}
    (args.out / "pictures.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (args.out / "pictures.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
