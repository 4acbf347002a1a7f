"""Adapters on ShareGPT conversations, with loss on the answers: python conversations.py."""

from datasets import load_dataset
from transformers import DataCollatorForSeq2Seq, TextStreamer, TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B-Instruct", max_seq_length=2048, dtype=None, load_in_4bit=True
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
tokenizer = get_chat_template(tokenizer, chat_template="chatml")


def to_text(rows):
    chats = rows["conversations"]
    return {"text": [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]}


dataset = standardize_sharegpt(load_dataset("mlabonne/FineTome-100k", split="train")).map(to_text, batched=True)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    eval_dataset=dataset.select(range(8)),
    dataset_text_field="text",
    max_seq_length=2048,
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer),
    dataset_num_proc=2,
    packing=False,
    args=TrainingArguments(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        warmup_steps=5,
        max_steps=6,
        learning_rate=2e-4,
        fp16=not is_bfloat16_supported(),
        bf16=is_bfloat16_supported(),
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.01,
        lr_scheduler_type="linear",
        seed=3407,
        output_dir="outputs",
        report_to="none",
    ),
)
trainer = train_on_responses_only(
    trainer, instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n"
)
labels = trainer.train_dataset[0]["labels"]
print("Learned:", tokenizer.decode([token for token in labels if token != -100]))
trainer_stats = trainer.train()
print("Steps:", trainer_stats.global_step, trainer.state.log_history[-1], trainer.evaluate())

FastLanguageModel.for_inference(model)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
streamer = TextStreamer(tokenizer, skip_prompt=True)
model.generate(**inputs.to(model.device), streamer=streamer, max_new_tokens=8, use_cache=True)
model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model.save_pretrained_merged("model", tokenizer, save_method="merged_16bit")
model.save_pretrained_merged("adapter", tokenizer, save_method="lora")
model.save_pretrained_gguf("gguf", tokenizer, quantization_method="q8_0")
