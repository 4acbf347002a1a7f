"""Plants one known bug at a time in a copy of the package and shows that a test catches it.

    python tests/planted/bugs.py [NAME ...]

Most are bugs that shipped somewhere in this field, the others their next of kin. A bug that no test
catches makes the command fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP, SETUP, PACKED, LORA = "train/step.py", "train/setup.py", "models/packed.py", "models/lora.py"
EXACT = "tests/parity/test_step_exact.py"
RUNS = "tests/unit/train/test_runs.py"
REPORTED = f"{RUNS}::test_what_is_reported_is_true"
RESUME = f"{RUNS}::test_resume_at_every_step_is_bit_equal"
COPY = "tests/unit/train/test_copy_beside.py::test_every_update_waits_for_the_copy"
RANKS = "tests/distributed/test_gloo.py::test_ranks_equal_one_process[lora-2]"


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in `file`; `test` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


BUGS = (
    Bug(
        "mean of means",
        STEP,
        "batch_loss / step.num_label_tokens",
        "batch_loss / max(1, batch.num_label_tokens) / len(micro_batches)",
        f"{EXACT}::test_packed_and_accumulated_equal_padded",
    ),
    Bug(
        "ranks averaged",
        "parallel/ddp.py",
        "dist.all_reduce(grads[0])",
        "dist.all_reduce(grads[0].div_(2))",
        RANKS,
    ),
    Bug(
        "gradients not summed over ranks",
        STEP,
        "    run.strategy.sum_gradients(run.parameters)\n    totals",
        "    totals",
        RANKS,
    ),
    Bug(
        "documents see each other",
        "models/head.py",
        '"cu_seq_lens_q": batch.cu_seqlens,',
        '"cu_seq_lens_q": batch.cu_seqlens[[0, -1]],',
        f"{EXACT}::test_packed_and_accumulated_equal_padded",
    ),
    Bug(
        "positions go on over documents",
        PACKED,
        "np.arange(len(token_ids)) - np.repeat(borders[:-1], lengths)",
        "np.arange(len(token_ids))",
        "tests/unit/models/test_packed_batch.py",
    ),
    Bug(
        "labels shifted by one",
        PACKED,
        "label_rows=torch.from_numpy(label_positions - 1)",
        "label_rows=torch.from_numpy(label_positions)",
        f"{EXACT}::test_packed_and_accumulated_equal_padded",
    ),
    Bug(
        "a document predicts the next one",
        PACKED,
        "    trained[borders[:-1]] = False\n",
        "",
        "tests/unit/models/test_packed_batch.py",
    ),
    Bug("rate moves per micro-batch", STEP, "run.progress.num_updates +", "run.progress.num_updates * 2 +", REPORTED),
    Bug("optimizer not restored", SETUP, "    load_optimizer_state(run.optimizer", "    0 and (run.optimizer", RESUME),
    Bug("dropout not tied to the position", STEP, "step=step.index, rank", "step=id(step), rank", RESUME),
    Bug("evaluation leaves dropout off", STEP, "    run.model.train()\n", "", f"{EXACT}::test_evaluation_equals"),
    Bug("evaluation with dropout", STEP, "    run.model.eval()\n", "", f"{EXACT}::test_evaluation_equals"),
    Bug(
        "rows repeated to fill the last step",
        "plan/steps.py",
        "np.arange(start, min(start + (stop - first) * per_step, self.num_samples))",
        "np.arange(start, start + (stop - first) * per_step) % self.num_samples",
        "tests/property/test_plan_properties.py",
    ),
    Bug("merge without the scale", LORA, "self.scaling * product", "product", "tests/parity/test_export_models.py"),
    Bug(
        "head untied",
        "models/load.py",
        "    model.train()\n    report = _report(",
        "    head = model.get_output_embeddings()\n"
        "    head.weight = torch.nn.Parameter(head.weight.detach().clone())\n    report = _report(",
        f"{EXACT}::test_tied_embedding_gets_the_gradient_of_both_uses",
    ),
    Bug(
        "non-finite loss trained on",
        "train/guards.py",
        "if math.isfinite(loss) and math.isfinite(grad_norm):",
        "if True:",
        f"{RUNS}::test_a_non_finite_loss_stops_before_the_update",
    ),
    Bug(
        "end of turn not trained",
        "data/mask.py",
        "return MaskedText(row.text, spans, typed, dropped)",
        "return MaskedText(row.text, tuple((a, b - 1) for a, b in spans), typed, dropped)",
        "tests/unit/data/test_mask_rules.py",
    ),
    Bug("clipping left out", STEP, "(run.config.optim.max_grad_norm / ", "(1e30 / ", f"{EXACT}::test_grad_norm"),
    Bug(
        "norms decayed",
        "train/optim.py",
        "if parameter.ndim >= 2]",
        "if parameter.ndim >= 1]",
        "tests/unit/train/test_optim.py",
    ),
    Bug(
        "gradients of a failed pass kept",
        "train/memory.py",
        "    run.optimizer.zero_grad(set_to_none=True)\n",
        "",
        "tests/unit/train/test_out_of_memory.py::test_only_the_gradients_of_the_pass_that_fits_remain",
    ),
    Bug(
        "joined gradient without the scale",
        "models/joined.py",
        ".to(ctx.dtype) * ctx.scaling",
        ".to(ctx.dtype)",
        "tests/parity/test_joined_lora.py",
    ),
    Bug(
        "training reads an old adapter",
        STEP,
        "    run.joined.refresh()\n    loss_sum",
        "    loss_sum",
        f"{RUNS}::test_a_resumed_run_reads_the_restored_adapter",
    ),
    Bug(
        "evaluation reads an old adapter",
        STEP,
        "    run.joined.refresh()\n    totals",
        "    totals",
        f"{EXACT}::test_evaluation_equals",
    ),
    Bug("update beside the copy", STEP, "    run.saver.before_update()\n    # the scaler", "    # the scaler", COPY),
    Bug("update ahead beside the copy", STEP, "    run.saver.before_update()\n    with", "    with", COPY),
    Bug("update in backward beside the copy", "train/step_backward.py", "    run.saver.before_update()\n", "", COPY),
    Bug(
        "a finished first rank taken for a dead one",
        "parallel/heartbeat.py",
        "self._first_has_left = True",
        "self._first_has_left = False",
        "tests/unit/parallel/test_heartbeat.py",
    ),
    Bug(
        "layers compiled again in mid-run",
        "models/compile.py",
        'f"triton.{fusing}": True',
        'f"triton.{fusing}": False',
        "tests/unit/models/test_compile_fallback.py::test_the_kernel_of_norms_gradients",
    ),
    Bug(
        "compiler at work while weights are read",
        "models/compile.py",
        "            maybe_warm_pool()\n",
        "            torch.compile(lambda x: x + 1, backend='eager')(torch.ones(8))\n",
        "tests/unit/models/test_compile_fallback.py::test_what_is_imported_early",
    ),
)


def plant(bug: Bug, copy: Path) -> None:
    file = copy / "flatout" / bug.file
    text = file.read_text()
    assert text.count(bug.old) == 1, f"{bug.name}: {bug.file} holds {text.count(bug.old)} of the text to replace"
    file.write_text(text.replace(bug.old, bug.new))


def is_caught(bug: Bug) -> bool:
    """Run the bug's test against the copy; its exit code 1 means that tests ran and failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("flatout", "tests", "pyproject.toml"):
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
        plant(bug, copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        if bug.test.endswith("]"):
            command.append(bug.test)
        else:
            test, _, wanted = bug.test.partition("::")
            command += [test, "-k", wanted] if wanted else [test]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout[-3000:]
        return done.returncode == 1


def main() -> int:
    wanted = sys.argv[1:]
    bugs = [bug for bug in BUGS if not wanted or bug.name in wanted]
    num_caught = 0
    for bug in bugs:
        started = time.perf_counter()
        caught = is_caught(bug)
        num_caught += caught
        print(
            f"{'caught' if caught else 'MISSED':<7} {bug.name:<40} {time.perf_counter() - started:5.1f} s  {bug.test}"
        )
    print(f"planted bugs caught: {num_caught} of {len(bugs)}")
    return 0 if num_caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
