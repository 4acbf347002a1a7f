"""One run of plain transformers, PEFT or Unsloth on the samples of a flatout data set: `python plain_trainer.py JSON`.

Started by benchmarks/one_rounding.py. A job with `adapters` judges trained weights instead of training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RANK = 16


def train(job: dict[str, Any]) -> None:
    """Train with plain transformers and PEFT; write the losses of updates and of the held-out rows."""
    import torch

    from flatout.data.registry import built_dir
    from flatout.data.token_store import TokenStore

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def samples(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return token ids (1, T) and labels (T,) as our data set has them."""
        store, found = TokenStore.open(built_dir(Path(job["root"]), name)), []
        for index in range(store.num_samples):
            ids, is_label = store.sample(index).pair
            labels = torch.from_numpy(ids.astype("int64").copy()).masked_fill(torch.from_numpy(~is_label), -100)
            found.append((torch.from_numpy(ids.astype("int64"))[None].to(device), labels.to(device)))
        return found

    rows, held_out = samples(job["rows"]), samples("eval")
    model = load_unsloth(job) if job["unsloth"] else load_plain(job, device)
    mixed = job["precision"] != "fp32"

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
            logits = model(input_ids=ids).logits
        return torch.nn.functional.cross_entropy(logits[0, :-1].float(), labels[1:], reduction="sum")

    def count(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        return sum(int((labels[1:] != -100).sum()) for _, labels in batch)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["lr"], weight_decay=0.0)
    found: dict[str, Any] = {"loss": [], "eval": {}}
    for step in range(len(rows) // job["per_update"]):
        batch, total = rows[job["per_update"] * step : job["per_update"] * (step + 1)], 0.0
        for ids, labels in batch:
            loss = loss_of(ids, labels) / count(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(total)
        if step + 1 in job["eval_at"]:
            model.eval()
            with torch.no_grad():
                found["eval"][step + 1] = sum(loss_of(*row).item() for row in held_out) / count(held_out)
            model.train()
    model.save_pretrained(job["final"])
    Path(job["result"]).write_text(json.dumps(found))


def load_plain(job: dict[str, Any], device: str) -> Any:
    """The model in the job's precision; with an adapter as PEFT trains it, in fp32, else all weights are trained."""
    import torch
    from peft import PeftModel, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.float32 if job["precision"] == "fp32" else torch.bfloat16}
    if job["precision"] == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(job["model"], device_map={"": device}, **options)
    if job["precision"] == "nf4":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if not job["adapter"]:
        return model.train()
    # autocast_adapter_dtype, PEFT's default, keeps the adapter in fp32
    return PeftModel.from_pretrained(model, job["adapter"], is_trainable=True).train()


def load_unsloth(job: dict[str, Any]) -> Any:
    """The model with its first adapter as Unsloth trains it."""
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        job["model"], max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=job["precision"] == "nf4"
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=2 * RANK, lora_dropout=0, bias="none", target_modules=targets,
        use_gradient_checkpointing=False, random_state=0,
    )  # fmt: skip
    set_peft_model_state_dict(model, load_file(f"{job['adapter']}/adapter_model.safetensors"))
    return model.train()


def judge(job: dict[str, Any]) -> None:
    """Write held-out losses of trained adapters over a base in fp32, or of trained models, by transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from flatout.data.registry import built_dir
    from flatout.data.token_store import TokenStore

    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = TokenStore.open(built_dir(Path(job["root"]), "eval"))
    rows = [store.sample(index).pair for index in range(store.num_samples)]
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).to(device)
    found = {}
    for name, final in job["adapters"].items():
        is_adapter = (Path(final) / "adapter_config.json").exists()
        if is_adapter:
            model = PeftModel.from_pretrained(base, final).eval()
        else:
            model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32).to(device).eval()
        loss_sum, num_labels = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(rows), 20):
                # padding at the end: no token before it attends to it
                batch = rows[start : start + 20]
                ids = torch.zeros(len(batch), max(len(own) for own, _ in batch), dtype=torch.long)
                labels = torch.full_like(ids, -100)
                for place, (own, is_label) in enumerate(batch):
                    ids[place, : len(own)] = torch.from_numpy(own.astype("int64"))
                    labels[place, : len(own)][torch.from_numpy(is_label)] = ids[place, : len(own)][
                        torch.from_numpy(is_label)
                    ]
                logits = model(input_ids=ids.to(device)).logits[:, :-1].flatten(0, 1).float()
                loss_sum += torch.nn.functional.cross_entropy(
                    logits, labels[:, 1:].flatten().to(device), reduction="sum"
                ).item()
                num_labels += int((labels[:, 1:] != -100).sum())
        found[name] = loss_sum / num_labels
        if is_adapter:
            base = model.unload()
    Path(job["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("unsloth"):
        # it must come before transformers
        import unsloth  # noqa: F401
    (judge if "adapters" in given else train)(given)
