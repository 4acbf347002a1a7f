"""One measured run of another trainer, as its users would write it: `python peer_trainer.py JOB.json`.

Started by `python -m benchmarks.bench --peers`, which puts benchmarks/ on the Python path. Unsloth, TRL, or TRL with
Liger get the same model folder, token ids, label masks, samples of each step, adapter, optimizer and schedule as
flatout; what differs is in the job (rows.json). A path named fa_shim in the job's paths is used only by rows with
`fa2`: it hands torch's FlashAttention-2 to them where no flash-attn wheel exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# PEFT's names where experts are fused; Unsloth finds them by TARGETS
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK = 16


def num_processes() -> int:
    """Processes that share each step."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def prepare(job: dict[str, Any]) -> None:
    """Python path and environment, before any of the libraries is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        UNSLOTH_DISABLE_STATISTICS="1",
        WANDB_DISABLED="true",
        TOKENIZERS_PARALLELISM="false",
        **job.get("env", {}),
    )
    wanted = [path for path in job["paths"] if job.get("fa2") or Path(path).name != "fa_shim"]
    sys.path[:0] = wanted
    # Unsloth keeps its compiled classes where the process stands: one folder for all runs, as a user would have
    os.chdir(Path(job["run_dir"]).parent)


def load(job: dict[str, Any], max_tokens: int) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer and what else the trainer is given."""
    if job["system"] == "unsloth":
        return load_unsloth(job, max_tokens)
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if job["load"] == "4bit":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(
        job["model_dir"],
        dtype=torch.bfloat16,
        attn_implementation=job.get("attention", "sdpa"),
        **(local_device(num_processes()) or {"device_map": {"": 0} if torch.cuda.is_available() else None}),
        **options,
    )
    targets = {"target_modules": TARGETS[:4], "target_parameters": EXPERTS}
    if not job.get("experts"):
        targets = {"target_modules": TARGETS}
    adapter = LoraConfig(r=RANK, lora_alpha=RANK, task_type="CAUSAL_LM", **targets)
    return model, AutoTokenizer.from_pretrained(job["model_dir"]), {"peft_config": adapter}


def local_device(num_processes: int) -> dict[str, Any]:
    """Where this process puts its model: a device map for one of several processes, nothing for one alone."""
    if num_processes == 1:
        return {}
    import torch

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return {"device_map": {"": local}}


def load_unsloth(job: dict[str, Any], max_tokens: int) -> tuple[Any, Any, dict[str, Any]]:
    import torch
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        job["model_dir"],
        max_seq_length=max_tokens,
        dtype=torch.bfloat16,
        load_in_4bit=job["load"] == "4bit",
        load_in_8bit=False,
        **local_device(num_processes()),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing=job["checkpointing"],
        random_state=0,
    )
    return model, tokenizer, {}


def arguments(job: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """SFTConfig: the fixed part, then the row's."""
    import torch

    cuda = torch.cuda.is_available()
    values: dict[str, Any] = {
        "output_dir": job["run_dir"],
        "per_device_train_batch_size": job["batch"],
        "gradient_accumulation_steps": job["samples_per_step"] // job["batch"] // num_processes(),
        "ddp_find_unused_parameters": False if num_processes() > 1 else None,
        "max_steps": job["num_steps"],
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "max_length": max_tokens,
        "packing": False,
        # without it TRL ignores completion_mask and trains on every token
        "completion_only_loss": True,
        "bf16": cuda,
        "use_cpu": not cuda,
        "dataloader_num_workers": 0,
        "seed": 0,
        "gradient_checkpointing": bool(job["checkpointing"]),
    }
    if job.get("padding_free") is not None:
        values["padding_free"] = job["padding_free"]
    if job.get("padding_free"):
        values["max_length"] = None
    if job.get("liger"):
        values["use_liger_kernel"] = True
    return values


def rows_of(store: Any) -> list[dict[str, Any]]:
    """The store's samples in order. Given `labels` instead of the mask, Unsloth would take a padding collator."""
    rows = []
    for index in range(store.num_samples):
        ids, loss_mask = store.sample(index).pair
        mask = loss_mask.astype(int).tolist()
        rows.append({"input_ids": ids.tolist(), "completion_mask": mask, "attention_mask": [1] * len(ids)})
    return rows


def check_data(trainer: Any, num_labels: int) -> dict[str, Any]:
    """The digest of the trainer's data after its own preparation, and the shape of its first batch.

    Exits when the collator does not keep that batch's `num_labels` label tokens: the work would be another.
    """
    import numpy as np
    from bench.samples import digest

    rows = list(trainer.train_dataset)
    ids = np.array([token for row in rows for token in row["input_ids"]], np.int32)
    labels = np.array([label for row in rows for label in row["labels"]], np.int64)
    batch = trainer.data_collator(rows[: trainer.args.per_device_train_batch_size])
    collated = int((batch["labels"] != -100).sum())
    if collated != num_labels:
        sys.exit(f"the collator gives {collated} label tokens for the first batch, expected {num_labels}")
    return {"digest": digest(ids, labels != -100), "batch_shape": list(batch["input_ids"].shape)}


def train(job: dict[str, Any], store: Any) -> dict[str, Any]:
    """Train and return the figures; steps are timed between ends of optimizer steps, the device waited for."""
    import torch
    from bench.figures import figures
    from bench.machine import gpu_header, gpu_memory, versions
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    begins_s: list[float] = []
    ends_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins_s.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends_s.append(time.time())

    max_tokens = int(store.lengths.max())
    model, tokenizer, options = load(job, max_tokens)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**arguments(job, max_tokens)),
        train_dataset=Dataset.from_list(rows_of(store)),
        processing_class=tokenizer,
        callbacks=[Clock()],
        **options,
    )
    trainer._get_train_sampler = lambda *_, **__: SequentialSampler(trainer.train_dataset)
    checked = check_data(trainer, int(store.num_label_tokens[: job["batch"]].sum()))
    trainer.train()
    memory, gpu = gpu_memory(), gpu_header()
    per_step = (-1, job["samples_per_step"])
    return {
        **figures(
            [end - before for before, end in zip([job["launched_s"], *ends_s], ends_s, strict=False)],
            store.lengths.reshape(per_step).sum(1).tolist(),
            store.num_label_tokens.reshape(per_step).sum(1).tolist(),
        ),
        **memory,
        "first_step_s": ends_s[0] - begins_s[0],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **checked,
        "gpu_after": gpu,
        "versions": versions(),
        "collator": type(trainer.data_collator).__name__,
        "padding_free": getattr(trainer.args, "padding_free", None),
        "attention": getattr(model.config, "_attn_implementation", None),
    }


def main(path: Path) -> None:
    job = json.loads(path.read_text(encoding="utf-8"))
    prepare(job)
    if job["system"] == "unsloth":
        # it must come before transformers
        import unsloth  # noqa: F401
    # after that import, which sets up torch's allocator
    from bench import cap

    cap.apply(job["cap_bytes"])
    from flatout.data.token_store import TokenStore

    # each process holds at most its share of a step
    job["batch"] = min(job["batch"], job["samples_per_step"] // num_processes())
    result = train(job, TokenStore.open(Path(job["store"])))
    if os.environ.get("RANK", "0") == "0":
        Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
