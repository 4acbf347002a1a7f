# Start it with: hypersloth-train ./example_training_config.py
from HyperSloth.hypersloth_config import *

hyper_config_model = HyperConfig(
    # built by: hypersloth-build-dataset --hf_dataset mlabonne/FineTome-100k -n 1000 --name finetom-1k \
    #           --tokenizer Qwen/Qwen3-8B
    data=DataConfig.from_dataset_name("finetom-1k"),
    # one process per GPU; loss on response_only (the assistant's turns) or all tokens
    training=TrainingConfig(gpus=[0, 1], loss_type="response_only"),
    fast_model_args=FastModelArgs(model_name="unsloth/Qwen3-0.6b-bnb-4bit", max_seq_length=2048, load_in_4bit=True),
    lora_args=LoraArgs(r=16, lora_alpha=16),
)

training_config_model = TrainingArgsConfig(
    output_dir="outputs/qwen3-0.6b-finetom-1k",
    # samples per step: 2 * 8 * number of GPUs
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    learning_rate=2e-4,
    num_train_epochs=1,
    warmup_steps=5,
    save_total_limit=2,
    weight_decay=0.01,
    optim="adamw_8bit",
    seed=3407,
    report_to="none",
)
