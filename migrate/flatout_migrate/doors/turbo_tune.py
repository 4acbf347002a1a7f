"""Turbo-Tune's training script, qwen3_sft.py: its flags become flatout's settings, and flatout trains."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from flatout import UsageError
from flatout.api.commands import exit_code_of
from flatout.api.settings import Config, make_config, read_json, require_packages
from flatout_migrate.doors.launched import OVERRIDES_HELP, data_of, device, run, say, with_rows_per_step
from flatout_migrate.training_arguments import TRAINING_ARGUMENTS
from flatout_migrate.translation import Became, Given, RefusedError, Rule, any_value, off, to, translate

# what the script does without being told
DEFAULTS: Mapping[str, Any] = {
    "train_steps": 100, "save_steps": 500, "global_batch_size": 128, "learning_rate": 2e-5, "optim": "adamw_torch",
    "weight_decay": 0.1, "max_length": 4096, "use_lora": False, "completion_only_loss": False,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
}  # fmt: skip
# the script reads it from here
FSDP_JSON = Path("config/fsdp.json")
# entries of zero_optimization, and why they have no effect
LEFT_OUT = {
    "tensor_parallel": "DeepSpeed refuses to start with it in zero_optimization",
    "stage3_module_granularity_threshold": "the experts of a layer are one tensor, which is gathered as a whole",
}


def _of_lora(setting: str) -> Rule:
    def rule(given: Given) -> Became:
        if not given.all["use_lora"]:
            raise RefusedError("it has no effect without --use_lora; add that, or remove this")
        return Became({setting: given.value})

    return rule


FLAGS: Mapping[str, Rule] = {
    **TRAINING_ARGUMENTS,
    "model_path": to("model.name"),
    "tokenizer_path": to("data.tokenizer"),
    "train_steps": to("batch.max_steps"),
    "global_batch_size": to("batch.samples_per_step"),
    "micro_batch_size": lambda given: Became(
        {"batch.micro_batch_tokens": int(given.number()) * int(given.number("max_length"))}
    ),
    "use_packing": any_value("steps are always packed; here it says that --global_batch_size counts packed rows"),
    "use_lora": lambda given: Became({"method": "lora", "lora.dropout": 0.05} if given.value else {"method": "full"}),
    "rank": _of_lora("lora.rank"),
    "alpha": _of_lora("lora.alpha"),
    "use_fp8": lambda given: Became({"base.storage" if given.all["use_lora"] else "full.compute": "fp8"}),
    "use_fast_moe_block": off(
        "flatout has no expert kernels of its own: experts run as transformers runs them; remove it"
    ),
    "use_liger_efficiency_callback": lambda given: Became({"track.to": ["mlflow"]}),
    "local_rank": any_value("the launcher's environment says it"),
}
_TYPES: Mapping[type, str] = {
    str: "tokenizer_path output_dir optim deepspeed_config fsdp run_name",
    int: "train_steps save_steps global_batch_size micro_batch_size max_length rank logging_steps local_rank",
    float: "learning_rate weight_decay alpha",
}
_SWITCHES = (
    "use_fast_moe_block use_fp8 use_liger_kernel torch_compile use_packing use_lora completion_only_loss "
    "full_determinism use_liger_efficiency_callback"
)


def to_config(given: Mapping[str, Any], overrides: Sequence[str] = (), *, counts_rows: bool = True) -> Config:
    """Return flatout's configuration for these flags. Raises a UsageError that names every flag it cannot honor.

    Without `counts_rows`, nothing is tokenized, and a batch of packed rows keeps its number of rows.
    """
    values = {name: value for name, value in given.items() if name not in ("dataset_path", "deepspeed_config")}
    if given.get("deepspeed_config"):
        values["deepspeed"] = _read_deepspeed(Path(given["deepspeed_config"]))
    if given.get("fsdp") and FSDP_JSON.is_file():
        values["fsdp_config"] = read_json(FSDP_JSON)
    of_lora = {"rank": 8, "alpha": 0.5} if given.get("use_lora") else {}
    translation = translate(values, FLAGS, defaults={**DEFAULTS, **of_lora})
    settings = translation.checked("qwen3_sft.py")
    for outcome in translation.outcomes:
        if outcome.note and not outcome.is_default:
            say(f"--{outcome.name}: {outcome.describe()}")
    # question and answer with a space between, without a chat template
    data = data_of(given["dataset_path"], settings["data"].pop("max_tokens"), format="alpaca")
    settings = {
        "name": "turbo-tune",
        "device": device(),
        **settings,
        "data": {"too_long": "truncate", **settings["data"], **data, "template": "plain"},
    }
    if given.get("use_packing") and counts_rows:
        return with_rows_per_step(settings, overrides, settings["batch"]["samples_per_step"])
    return make_config(settings, overrides, origin="flags")


def _read_deepspeed(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON, without the entries of zero1.json and zero3.json that cannot work."""
    content: dict[str, Any] = read_json(path)
    zero = content.get("zero_optimization") if isinstance(content, dict) else None
    if not isinstance(zero, dict):
        raise UsageError(f"--deepspeed_config {path}: expected an object with zero_optimization")
    for name, why in LEFT_OUT.items():
        if zero.pop(name, None) is not None:
            say(f"--deepspeed_config: {name} is left out: {why}")
    return content


def check(config: Config, num_ranks: int) -> int:
    """Raise UsageError with all packages that the run needs and that are missing, before a launcher starts ranks."""
    require_packages(config, num_ranks)
    return 0


def main() -> int:
    """`qwen3_sft.py`: train, alone or as the rank that torchrun, accelerate or deepspeed started."""
    parser = argparse.ArgumentParser(
        prog="qwen3_sft.py", description="Fine-tune.", argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--dataset_path", required=True)
    for kind, names in _TYPES.items():
        for name in names.split():
            parser.add_argument(f"--{name}", type=kind)
    for name in _SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.name=value", help=OVERRIDES_HELP)
    parser.add_argument("--check_for", type=int, metavar="RANKS", help="only check what so many ranks need")
    given = vars(parser.parse_intermixed_args())
    overrides, num_ranks = given.pop("overrides"), given.pop("check_for", None)
    if num_ranks is not None:
        # the ranks repeat the notes on flags
        with redirect_stdout(StringIO()):
            return exit_code_of(lambda: check(to_config(given, overrides, counts_rows=False), num_ranks))
    return run(lambda: to_config(given, overrides))


if __name__ == "__main__":
    raise SystemExit(main())
