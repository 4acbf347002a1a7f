"""OpenSloth's documented script: edit it, then `python scripts/train.py`."""

from opensloth.opensloth_config import FastModelArgs, HFDatasetConfig, LoraArgs, OpenSlothConfig, TrainingArguments
from opensloth.scripts.opensloth_sft_trainer import run_mp_training, setup_envs

# use [0] for debugging
gpus = [0, 1]

opensloth_config = OpenSlothConfig(
    data=HFDatasetConfig(
        dataset_name="mlabonne/FineTome-100k",
        split="train",
        num_samples=10_000,
        tokenizer_name="Qwen/Qwen3-8B",
        chat_template="qwen3",
        instruction_part="<|im_start|>user\n",
        response_part="<|im_start|>assistant\n",
        max_seq_length=16_000,
    ),
    devices=gpus,
    fast_model_args=FastModelArgs(model_name="unsloth/Qwen3-0.6b-bnb-4bit", max_seq_length=16_000, load_in_4bit=True),
    lora_args=LoraArgs(r=8, lora_alpha=16),
    sequence_packing=True,
)

training_config = TrainingArguments(
    output_dir="outputs/qwen3-0.6b-FineTome-2gpu-packing",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=16,
    learning_rate=1e-5,
    num_train_epochs=1,
    lr_scheduler_type="linear",
    warmup_steps=5,
    save_total_limit=1,
    weight_decay=0.01,
    optim="adamw_8bit",
    seed=3407,
    report_to="none",
)

if __name__ == "__main__":
    setup_envs(opensloth_config, training_config)
    run_mp_training(opensloth_config.devices, opensloth_config, training_config)
