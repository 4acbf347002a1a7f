"""`unsloth-cli.py`: fine-tune adapters on instruction data, by the flags of Unsloth's script."""

from __future__ import annotations

import argparse

from flatout_migrate.call_arguments import PEFT_DEFAULTS
from flatout_migrate.doors import parser_of
from flatout_migrate.translation import read_table

PROMPT: str = read_table("flags")["prompt of unsloth-cli.py"]


def run(args: argparse.Namespace) -> int:
    """Train, save and push as the flags say; return 0."""
    from datasets import Dataset

    from flatout.api.data import read_rows
    from flatout_migrate.unsloth import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments, is_main_process

    given, groups = vars(args), read_table("flags")["unsloth-cli.py"]
    of = {group: {name: given[name] for name in (flag.split()[0][2:] for flag in groups[group])} for group in groups}
    load = {**of["Model Options"], "dtype": None if args.dtype == "None" else args.dtype}
    dataset = load.pop("dataset")
    model, tokenizer = FastLanguageModel.from_pretrained(**load, device_map="auto")
    model = FastLanguageModel.get_peft_model(
        model, target_modules=PEFT_DEFAULTS["target_modules"], **of["LoRA Options"]
    )
    texts = [PROMPT.format(**{"input": "", **row}) + tokenizer.eos_token for row in read_rows(dataset)]
    config = UnslothTrainingArguments(args.output_dir, **of["Training Options"], **of["Report Options"])
    rows = Dataset.from_dict({"text": texts})
    trainer = UnslothTrainer(model=model, tokenizer=tokenizer, train_dataset=rows, args=config)
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
    return 0


def main() -> int:
    """Run the command line; return its exit code."""
    from flatout.api.commands import exit_code_of

    args = parser_of("unsloth-cli.py", description="Fine-tune a language model, on flatout.").parse_args()
    return exit_code_of(lambda: run(args))
