"""Adapters on several GPUs: python multi_gpu_training.py, or torchrun --nproc_per_node=2 multi_gpu_training.py."""

import torch
from datasets import load_dataset
from unsloth import FastLanguageModel
from unsloth.distributed_utils import get_world_size, is_main_process, print_distributed_info
from unsloth.trainer import UnslothTrainer, UnslothTrainingArguments

print_distributed_info()
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B-Instruct",
    max_seq_length=2048,
    dtype=None,
    load_in_4bit=True,
    device_map="auto",  # every visible GPU
    trust_remote_code=False,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=16,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
    use_rslora=False,
    loftq_config=None,
)


def to_text(rows):
    columns = zip(rows["instruction"], rows["output"], strict=True)
    return {"text": [f"### Instruction:\n{asked}\n\n### Response:\n{answer}" for asked, answer in columns]}


dataset = load_dataset("yahma/alpaca-cleaned", split="train[:100]").map(to_text, batched=True)
training_args = UnslothTrainingArguments(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    warmup_steps=5,
    max_steps=6,
    learning_rate=2e-4,
    fp16=not torch.cuda.is_bf16_supported(),
    bf16=torch.cuda.is_bf16_supported(),
    logging_steps=1,
    optim="adamw_8bit",
    weight_decay=0.01,
    lr_scheduler_type="linear",
    seed=3407,
    output_dir="./multi_gpu_outputs",
    enable_distributed_training=True,
    distributed_backend="nccl",
    ddp_find_unused_parameters=False,
    ddp_bucket_cap_mb=25,
    ddp_broadcast_buffers=False,
    dataloader_pin_memory=True,
    auto_find_batch_size=False,
    gradient_checkpointing=True,
    report_to="none",
    save_strategy="steps",
    save_steps=30,
    save_only_model=True,
    logging_first_step=True,
    eval_strategy="no",
    dataloader_num_workers=0,
    remove_unused_columns=False,
)
trainer = UnslothTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    args=training_args,
    dataset_text_field="text",
    max_seq_length=2048,
    dataset_num_proc=2,
    packing=False,
)
trainer.train()
if is_main_process():
    trainer.save_model()
    print(f"Trained {training_args.max_steps} steps on {get_world_size()} process(es): {training_args.output_dir}")
