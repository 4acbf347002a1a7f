"""`unsloth-cli.py`: fine-tune adapters on instruction data, by the flags of Unsloth's script."""

from __future__ import annotations

import argparse
import sys

TRACKERS = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow", "neptune", "tensorboard",
    "wandb", "all", "none",
)  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}"
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    made = argparse.ArgumentParser(prog="unsloth-cli.py", description="Fine-tune a language model, on flatout.")
    model = made.add_argument_group("Model Options").add_argument
    model("--model_name", default="unsloth/llama-3-8b", help="name or folder of the model")
    model("--max_seq_length", type=int, default=2048, help="tokens of a sample")
    model("--dtype", help="bfloat16, float16 or float32; by default what the GPU has")
    model("--load_in_4bit", action="store_true", help="store frozen weights in 4 bits")
    model("--dataset", default="yahma/alpaca-cleaned", help="name or path of rows with instruction, input, output")
    lora = made.add_argument_group("LoRA Options").add_argument
    lora("--r", type=int, default=16, help="rank")
    lora("--lora_alpha", type=int, default=16)
    lora("--lora_dropout", type=float, default=0.0)
    lora("--bias", default="none")
    lora("--use_gradient_checkpointing", default="unsloth")
    lora("--random_state", type=int, help="seed; the same as --seed")
    lora("--use_rslora", action="store_true", help="rank-stabilized LoRA")
    lora("--loftq_config")
    train = made.add_argument_group("Training Options").add_argument
    train("--per_device_train_batch_size", type=int, default=2)
    train("--gradient_accumulation_steps", type=int, default=4)
    train("--warmup_steps", type=int, default=5)
    train("--max_steps", type=int, default=400)
    train("--learning_rate", type=float, default=2e-4)
    train("--optim", default="adamw_8bit")
    train("--weight_decay", type=float, default=0.01)
    train("--lr_scheduler_type", default="linear")
    train("--seed", type=int, default=3407)
    report = made.add_argument_group("Report Options").add_argument
    report("--report_to", default="tensorboard", choices=TRACKERS)
    report("--logging_steps", type=int, default=1)
    save = made.add_argument_group("Save Model Options").add_argument
    save("--output_dir", default="outputs")
    save("--save_model", action="store_true", help="write the trained model to --save_path")
    save("--save_method", default="merged_16bit", choices=["merged_16bit", "merged_4bit", "lora"])
    save("--save_gguf", action="store_true", help="write GGUF files instead")
    save("--save_path", default="model")
    save("--quantization", "--quantization_method", nargs="+", default=["q8_0"], help="kinds of GGUF files")
    push = made.add_argument_group("Push Model Options").add_argument
    push("--push_model", action="store_true", help="push what is saved")
    push("--push_gguf", action="store_true", help="push GGUF files")
    push("--hub_path", default="hf/model")
    push("--hub_token")
    return made


def run(args: argparse.Namespace) -> None:
    """Train, save and push as the flags say."""
    from datasets import Dataset

    from flatout.api.data import read_rows
    from flatout_migrate.unsloth import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments, is_main_process

    model, tokenizer = FastLanguageModel.from_pretrained(
        args.model_name,
        max_seq_length=args.max_seq_length,
        dtype=None if args.dtype == "None" else args.dtype,
        load_in_4bit=args.load_in_4bit,
        device_map="auto",
    )
    lora = ("r", "lora_alpha", "lora_dropout", "bias", "use_gradient_checkpointing", "use_rslora", "loftq_config")
    model = FastLanguageModel.get_peft_model(
        model, target_modules=TARGETS, random_state=args.random_state, **{name: getattr(args, name) for name in lora}
    )
    texts = [PROMPT.format(**{"input": "", **row}) + tokenizer.eos_token for row in read_rows(args.dataset)]
    trained = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "warmup_steps", "max_steps", "learning_rate",
        "optim", "weight_decay", "lr_scheduler_type", "seed", "report_to", "logging_steps", "output_dir",
    )  # fmt: skip
    trainer = UnslothTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=Dataset.from_dict({"text": texts}),
        args=UnslothTrainingArguments(**{name: getattr(args, name) for name in trained}),
    )
    trainer.train()
    if args.save_model and (args.save_gguf or args.push_gguf):
        model.save_pretrained_gguf(args.save_path, tokenizer, quantization_method=args.quantization)
    elif args.save_model:
        model.save_pretrained_merged(args.save_path, tokenizer, args.save_method)
    elif is_main_process():
        print(f"The adapter is in {args.output_dir}/final; --save_model also writes the merged model.")
    if args.push_gguf:
        model.push_to_hub_gguf(args.hub_path, tokenizer, token=args.hub_token)
    if args.push_model:
        model.push_to_hub_merged(args.hub_path, tokenizer, args.save_method, args.hub_token)


def main() -> int:
    """Run the command line; return its exit code."""
    from flatout import FlatoutError

    args = parser().parse_args()
    try:
        run(args)
    except FlatoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
