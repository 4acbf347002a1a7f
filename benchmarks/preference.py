"""Preference training (DPO) beside TRL: pairs a second, peak memory, and tokens computed, packed and padded.

    python benchmarks/preference.py --shape qwen3-8b --peer-path /tmp/trl --peer-path /tmp/fa_shim
    python benchmarks/preference.py --shape qwen3-8b --lengths ultrafeedback --peer-path ...
    python benchmarks/preference.py --shape tiny --pairs 4 --steps 2 --peer-path ... device=cpu compile=off   # on a CPU

Every trainer gets the same random weights' shape, LoRA of rank 16 on all linears, the same pairs in the same order, and
takes the same steps. Token ids are random; lengths are those of 300 real pairs (`demo`: pair_lengths.json), or
lognormal ones like UltraFeedback's. Rows, each in a fresh process:

    bf16, fp8   flatout, its reference computed before step 0 and kept
    again       flatout in bf16 once more with another learning rate: nothing is left of the reference to compute
    trl         TRL's DPOTrainer: first one step of each of TRIALS, then `--steps` of the two fastest ones with the
                reference in each step, and precomputed

Two rates are shown. `kept` counts training steps only. `counted` counts the reference's pass over the same pairs too:
flatout's is timed after training, when nothing is compiled any more; TRL's is the time of its precomputation without
the hash of the model's weights, which takes longer than the rest and is left out.

`--peer-path` folders are for TRL's process alone: TRL itself where it is not installed, and a package that hands
torch's FlashAttention-2 to transformers where no flash-attn wheel exists. `--cap 24GB` shows every row a GPU of that
size, as `python -m benchmarks.bench --cap` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import cap
from bench.figures import WARMUP_STEPS
from bench.machine import gpu_header, gpu_memory, versions
from bench.parts import run_part, telling
from bench.samples import MAX_ID, MIN_ID, NAME, Samples
from bench.shapes import SHAPES, shape_config
from numpy.typing import NDArray
from peers.peer_trainer import RANK, TARGETS
from whole_steps import prepare, take_steps

from flatout.data.registry import built_dir
from flatout.data.token_store import TokenStore
from flatout.parallel.rank import Rank
from flatout.track.callback import MemoryCallback
from flatout.trainer.reference_logprobs import compute_step
from flatout.trainer.state import TrainingRun

OURS = {
    "bf16": [],
    "fp8": ["base.storage=fp8"],
    "again": ["optim.lr=1e-6"],
}
ROWS = ("bf16", "trl", "fp8", "again")
LENGTHS = ("demo", "ultrafeedback")
MAX_TOKENS = 4096
# batches of TRL's reference pass, which keeps no activations
TRL_REFERENCE_PAIRS = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """How TRL is run: pairs a micro-batch, gradient checkpointing, and Liger's kernels for layers."""

    pairs: int
    checkpointing: bool
    liger: bool

    def __str__(self) -> str:
        return f"{self.pairs} pairs{', checkpointing' * self.checkpointing}{', Liger' * self.liger}"


# Liger's kernels stay in the model, so they come last
TRIALS = [
    Trial(pairs, checkpointing, liger)
    for liger in (False, True)
    for pairs, checkpointing in ((2, False), (4, False), (4, True), (8, True), (16, True))
]


def pair_lengths(kind: str, num_pairs: int) -> NDArray[np.int64]:
    """Tokens of prompt, chosen and rejected answer, (num_pairs, 3): in a fixed random order."""
    rng = np.random.default_rng(0)
    if kind == "demo":
        given = np.array(json.loads(Path(__file__).with_name("pair_lengths.json").read_text())["pairs"], np.int64)
        order = np.concatenate([rng.permutation(len(given)) for _ in range(-(-num_pairs // len(given)))])
        return np.minimum(given[order[:num_pairs]], [MAX_TOKENS // 2, MAX_TOKENS // 2, MAX_TOKENS // 2])
    prompts = rng.lognormal(np.log(110), 1.0, num_pairs).clip(16, 1024)
    answers = rng.lognormal(np.log(240), 0.65, (num_pairs, 2)).clip(8, 1024)
    return np.column_stack([prompts, answers]).astype(np.int64)


def pair_samples(lengths: NDArray[np.int64], vocab_size: int) -> Samples:
    """Random pairs: prompt and chosen answer, then the same prompt and the rejected answer."""
    rng, ids, masks = np.random.default_rng(1), [], []
    for prompt, *answers in lengths.tolist():
        shared = rng.integers(MIN_ID, min(MAX_ID, vocab_size), prompt)
        for place, answer in enumerate(answers):
            own = rng.integers(MIN_ID, min(MAX_ID, vocab_size), answer)
            own[0] = MIN_ID + place  # the answers part at their first token
            ids.append(np.concatenate([shared, own]))
            masks.append(np.arange(prompt + answer) >= prompt)
    samples = np.concatenate(ids).astype(np.int32), np.concatenate(masks)
    return *samples, np.array([len(own) for own in ids], np.int64)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ours(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Steps of flatout, then its reference's pass over the timed ones."""
    num_steps = WARMUP_STEPS + args.steps if row != "again" else 1
    overrides = ["model.init=random", "objective=dpo", "optim.lr=5e-6", *OURS[row], *args.overrides]
    found = dict[str, Any]()

    def after(run: TrainingRun, recorder: MemoryCallback) -> None:
        found.update(gpu_memory())
        if row == "again":
            return
        started_s = time.perf_counter()
        for step in run.plan.steps(start=WARMUP_STEPS):
            compute_step(run, step)
        synchronize()
        found["reference_s"] = time.perf_counter() - started_s

    run, recorder = take_steps(args.out / "ours", overrides, num_steps, args.pairs, after=after)
    if not run.rank.is_first:
        return found
    steps = recorder.steps[WARMUP_STEPS:] or recorder.steps
    told = [text for _, name, text in recorder.stages if name == "reference"]
    num_tokens = sum(step.num_tokens for step in steps)
    found |= {
        "told": told,
        "launch_to_first_step_s": recorder.step_times_s[0] - args.launched_s,
        "steps_s": [round(step.step_s, 3) for step in recorder.steps],
        "train_s": sum(step.step_s for step in steps),
        "losses": [step.loss for step in recorder.steps],
        "computed_tokens": num_tokens - round(sum(step.shared_share * step.num_tokens for step in steps)),
        "micro_batches": [step.num_micro_batches for step in steps],
        "recompute": run.memory.recompute,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return found


class Trl:
    """TRL's DPOTrainer on one model, which each trial gets without the adapter of the last."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        self.args, cuda = args, torch.cuda.is_available()
        store = TokenStore.open(built_dir(args.out / "ours" / "data", NAME))
        self.rows = [_trl_row(store, unit) for unit in range(store.num_samples // 2)]
        torch.manual_seed(0)
        config = AutoConfig.for_model(**shape_config(args.shape))
        with torch.device("cuda" if cuda else "cpu"):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="flash_attention_2" if cuda else "sdpa"
            )
        self.tokenizer = AutoTokenizer.from_pretrained(args.out / "ours" / "model")
        self.trainer: Any = None

    def measure(self, trial: Trial, num_steps: int, *, precomputed: bool) -> dict[str, Any]:
        """One warm-up step and so many timed ones, the last of the data set; `error` if the memory does not do."""
        found: dict[str, Any] = {"trial": str(trial), "precomputed": precomputed}
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            found |= self._train(trial, num_steps, precomputed)
        # out of memory, or a kernel that does not run here
        except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
            found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        found |= gpu_memory()
        self._forget()
        return found

    def _forget(self) -> None:
        """Take the adapter, the trainer's forward and checkpointing out of the model, and free what they held."""
        if self.trainer is not None:
            self.model, self.trainer = self.trainer.model.unload(), None
            self.model.__dict__.pop("forward", None)
            if self.model.is_gradient_checkpointing:
                self.model.gradient_checkpointing_disable()
                self.model.disable_input_require_grads()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _train(self, trial: Trial, num_steps: int, precomputed: bool) -> dict[str, Any]:
        import pyarrow as pa
        import trl.trainer.dpo_trainer as module
        from datasets import Dataset
        from peft import LoraConfig
        from torch.utils.data import SequentialSampler
        from transformers import TrainerCallback
        from trl import DPOConfig, DPOTrainer

        ends_s: list[float] = []
        reference_s: list[float] = []

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                synchronize()
                ends_s.append(time.perf_counter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                synchronize()
                ends_s.append(time.perf_counter())

        class Trainer(DPOTrainer):  # type: ignore[misc]
            def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
                return dataset  # it has token ids

            def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
                return SequentialSampler(self.train_dataset)

            def _precompute_ref_logps(self, *values: Any, **named: Any) -> Any:
                synchronize()
                started_s = time.perf_counter()
                found = super()._precompute_ref_logps(*values, **named)
                reference_s.append(time.perf_counter() - started_s)
                return found

        module.hash_module = lambda _: f"{trial} {precomputed} {time.time()}"
        # given as a configuration, the reference is the model without it; given in the model, a copy of the adapter
        adapter = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        config = DPOConfig(
            str(self.args.out / "trl"), per_device_train_batch_size=trial.pairs,
            gradient_accumulation_steps=self.args.pairs // trial.pairs, max_steps=1 + num_steps, learning_rate=5e-6,
            lr_scheduler_type="constant", optim="adamw_torch_fused", logging_steps=1 + num_steps, report_to="none",
            save_strategy="no", max_length=None, bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=trial.checkpointing, use_liger_kernel=trial.liger, seed=0, disable_tqdm=True,
            precompute_ref_log_probs=precomputed, precompute_ref_batch_size=TRL_REFERENCE_PAIRS,
        )  # fmt: skip
        rows = self.rows[-(1 + num_steps) * self.args.pairs :]
        # named here, as some versions of dill cannot hash a table
        data = Dataset(pa.Table.from_pylist(rows), fingerprint=f"rows{len(rows)}")
        self.trainer = Trainer(
            model=self.model, args=config, train_dataset=data, processing_class=self.tokenizer, callbacks=[Clock()],
            peft_config=adapter,
        )  # fmt: skip
        self.trainer.train()
        found = {
            "train_s": ends_s[-1] - ends_s[1],
            "steps_s": [round(end - before, 3) for before, end in pairwise(ends_s)],
            "losses": [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry],
            "attention": self.model.config._attn_implementation,
        }
        # the pass is over the warm-up's pairs too
        return found | ({"reference_s": reference_s[0] * num_steps / (1 + num_steps)} if precomputed else {})


def _trl_row(store: TokenStore, unit: int) -> dict[str, list[int]]:
    (chosen, mask), (rejected, _) = (store.sample(2 * unit + place).pair for place in (0, 1))
    prompt = int(np.argmax(mask))
    return {
        "prompt_ids": chosen[:prompt].tolist(),
        "chosen_ids": chosen[prompt:].tolist(),
        "rejected_ids": rejected[prompt:].tolist(),
    }


def trl(args: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure TRL's trials and the two fastest of them; each figure is told as soon as it is known."""
    peer = Trl(args)
    trials = [
        trial for trial in TRIALS if args.pairs % trial.pairs == 0 and (not args.trials or str(trial) in args.trials)
    ]
    tried = []
    for trial in trials:
        if time.time() > args.trials_end_s and len(tried) > 1:
            tell({"left_out": str(trial)})
            continue
        found = peer.measure(trial, 1, precomputed=False)
        tell({"is_trial": True, **found})
        if "error" not in found:
            tried.append((found["train_s"], trial))
    best = sorted(tried, key=lambda pair: pair[0])[:2]
    for _, trial in sorted(best, key=lambda pair: pair[1].liger):
        for precomputed in (False, True):
            tell(peer.measure(trial, args.steps, precomputed=precomputed))


def padded_tokens(lengths: NDArray[np.int64], pairs: int) -> int:
    """Tokens of micro-batches of so many pairs, each padded to its longest answer."""
    longest = (lengths[:, 0] + lengths[:, 1:].max(1)).reshape(-1, pairs).max(1)
    return int(longest.sum() * 2 * pairs)


def table(results: dict[str, Any], args: argparse.Namespace) -> str:
    """The figures as Markdown: rates, memory and tokens of each row, then the ratios."""
    num_pairs, lines = args.steps * args.pairs, list[str]()
    kept, counted = dict[str, float](), dict[str, float]()
    for row in ("bf16", "fp8"):
        if found := results.get(row):
            kept[row] = num_pairs / found["train_s"]
            counted[row] = num_pairs / (found["train_s"] + found["reference_s"])
            lines.append(
                f"| flatout {row} | {kept[row]:.2f} | {counted[row]:.2f} | {found.get('peak_allocated_gib', 0):.1f} | "
                f"{found['computed_tokens'] / num_pairs:,.0f} | {found['recompute']} |"
            )
    finals = [each for each in results.get("trl", []) if "train_s" in each and not each.get("is_trial")]
    for found in finals:
        name, rate = f"TRL, {found['trial']}", num_pairs / found["train_s"]
        whole = num_pairs / (found["train_s"] + found.get("reference_s", 0.0))
        pairs = int(found["trial"].split()[0])
        tokens = padded_tokens(args.timed, pairs) / num_pairs
        how, kept_rate = ("precomputed", f"{rate:.2f}") if found["precomputed"] else ("reference in each step", "")
        peak = f"{found.get('peak_allocated_gib', 0):.1f}"
        lines.append(f"| {name}, {how} | {kept_rate} | {whole:.2f} | {peak} | {tokens:,.0f} | |")
        which = "TRL, precomputed" if found["precomputed"] else "TRL, in the step"
        if found["precomputed"]:
            kept[which] = max(kept.get(which, 0.0), rate)
        counted[which] = max(counted.get(which, 0.0), whole)
    packed = int(args.timed.sum() + args.timed[:, 0].sum()) / num_pairs
    head = (
        f"{args.shape}, {args.lengths}, {args.pairs} pairs a step, {args.steps} timed steps; a pair has {packed:,.0f} "
        "tokens when packed\n\n"
        "| | pairs/s, reference kept | pairs/s, reference counted | peak GiB | tokens computed a pair | recompute |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    ratios = [
        f"flatout {row}, reference {how} : {peer}, {peer_how} = {mine[row] / theirs[peer]:.2f}"
        for row in ("bf16", "fp8")
        for how, mine in (("kept", kept), ("counted", counted))
        for peer, peer_how, theirs in (
            ("TRL, in the step", "counted", counted),
            ("TRL, precomputed", "kept", kept),
            ("TRL, precomputed", "counted", counted),
        )
        if row in mine and peer in theirs
    ]
    again = [f"another learning rate: {results['again']['told']}" for _ in range("again" in results)]
    return "\n".join([head, *lines, "", *ratios, *again])


def part(args: argparse.Namespace) -> None:
    """One row, in this process; the first rank tells its figures."""
    cap.apply(args.cap)
    if not Rank.from_env().is_first:
        ours(args, args.part)
        return
    with telling(args.part, args.out) as tell:
        if args.part == "trl":
            trl(args, tell)
        else:
            tell(ours(args, args.part))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rows, one after another, each in a fresh process."""
    results: dict[str, Any] = {"gpu": gpu_header(), "versions": versions()}
    ends_s = time.time() + args.time_limit
    for row in args.rows:
        now_s, is_trl = time.time(), row == "trl"
        ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}")
        launcher = ranks if args.gpus > 1 and not is_trl else ()
        # the rest of the time is for the steps of TRL's fastest trials
        words = [f"--trials-end-s={now_s + min(ends_s - now_s, args.trials_s)}"]
        paths = args.peer_path if is_trl else ()
        if figures := run_part(row, words, args.out, left_s=ends_s - now_s, launcher=launcher, paths=paths):
            results[row] = figures if is_trl else figures[0]
    return results


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--lengths", choices=LENGTHS, default="demo")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--trials", type=lambda text: text.split(";"), default=[], help="of TRL, as 'A;B' (all)")
    parser.add_argument("--gpus", type=int, default=1, help="for flatout's rows; TRL's run on one (1)")
    parser.add_argument("--pairs", type=int, default=32, help="pairs a step (32)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (5)")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds for all rows (480)")
    parser.add_argument("--trials-s", type=float, default=120.0, help="seconds after which TRL tries no more (120)")
    parser.add_argument("--cap", type=cap.total_bytes, metavar="GPU", help="see a GPU of this size, such as 24GB")
    parser.add_argument("--peer-path", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("/tmp/preference"))
    parser.add_argument("--part", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--launched-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--trials-end-s", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="settings of flatout")
    args = parser.parse_intermixed_args(words)
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; expected some of {', '.join(ROWS)}")
    args.drawn = pair_lengths(args.lengths, (WARMUP_STEPS + args.steps) * args.pairs)
    args.timed = args.drawn[WARMUP_STEPS * args.pairs :]
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.part:
        part(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    shape = shape_config(args.shape)
    samples = pair_samples(args.drawn, int(shape["vocab_size"]))
    prepare(args.out / "ours", shape, 0, samples=samples, unit_size=2)
    results = measure(args)
    text = table(results, args)
    (args.out / "preference.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    (args.out / "preference.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
