"""`flatout convert` of ms-swift's `swift rlhf`: scripts and YAML files, as its own examples write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.cli.main import main
from flatout.config.read import load_config

COMMAND = """\
# 2 GPUs
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=2 \\
swift rlhf \\
    --rlhf_type KIND \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --train_type lora \\
    --dataset org/pairs \\
    --load_from_cache_file true \\
    --split_dataset_ratio 0.01 \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 1 \\
    --learning_rate 1e-4 \\
    --lora_rank 8 \\
    --lora_alpha 32 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps 8 \\
    --eval_steps 50 \\
    --save_steps 50 \\
    --save_total_limit 2 \\
    --max_length 2048 \\
    --output_dir output \\
    --warmup_ratio 0.05 \\
    --deepspeed zero2 \\
    --dataset_num_proc 4 MORE
"""
# rlhf_type, further options -> the objective
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("", {"kind": "dpo", "beta": 0.1}),
    "dpo ": ("--rpo_alpha 0.1 --beta 0.3", {"kind": "dpo", "beta": 0.3, "sft_weight": 0.1}),
    "dpo  ": ("--loss_type sigmoid sft --loss_weights 1 0.2", {"kind": "dpo", "beta": 0.1, "sft_weight": 0.2}),
    "dpo   ": ("--loss_type ipo", {"kind": "ipo", "beta": 0.1}),
    "cpo": ("", {"kind": "cpo", "beta": 0.1, "sft_weight": 1.0}),
    "cpo ": ("--loss_type simpo", {"kind": "simpo", "beta": 0.1, "sft_weight": 1.0, "gamma": 1.0}),
    "simpo": ("", {"kind": "simpo", "beta": 2.0, "sft_weight": 1.0, "gamma": 1.0}),
    "simpo ": ("--simpo_gamma 0.5 --cpo_alpha 0", {"kind": "simpo", "beta": 2.0, "sft_weight": 0.0, "gamma": 0.5}),
    "orpo": ("--beta 0.2", {"kind": "orpo", "beta": 0.2}),
    "kto": ("--desirable_weight 2", {"kind": "kto", "beta": 0.1, "desirable_weight": 2.0}),
    "rm": ("--center_rewards_coefficient 0.01", {"kind": "reward", "centering": 0.01}),
}

SCORES = {"rm": {"modules_to_save": ["score"]}}


def converted(folder: Path, text: str, *words: str, name: str = "run.sh") -> dict[str, Any]:
    (folder / name).write_text(text)
    out = folder / "out.yaml"
    assert main(["convert", str(folder / name), "--to", str(out), *words]) == 0
    load_config(out)
    values: dict[str, Any] = yaml.safe_load(out.read_text())
    return values


@pytest.mark.parametrize("case", LOSSES)
def test_a_command_becomes_a_run(tmp_path: Path, case: str) -> None:
    more, objective = LOSSES[case]
    values = converted(tmp_path, COMMAND.replace("KIND", case.strip()).replace("MORE", more), "--gpus", "2")
    assert values["objective"] == objective
    assert values == values | {
        "run_dir": "output",
        "method": "lora",
        "strategy": "zero2",
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct", "precision": "bf16"},
        "data": {
            "sources": [{"path": "org/pairs", "format": "kto" if case == "kto" else "preference"}],
            "max_tokens": 2048,
            "too_long": "drop",
        },
        "lora": {"rank": 8, "alpha": 32.0, "targets": "all-linear"} | SCORES.get(case, {}),
        "batch": {"samples_per_step": 16, "epochs": 1.0},
        "optim": {"lr": 1e-4, "beta2": 0.95, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.05},
        "eval": {"fraction": 0.01, "every_steps": 50},
        "checkpoint": {"every_steps": 50, "keep": 2},
    }


def test_its_own_defaults(tmp_path: Path) -> None:
    """A YAML of `swift rlhf --config`; by default a step has 16 samples, and nothing is too long for the model."""
    text = "rlhf_type: dpo\nmodel: org/model\ntrain_type: full\nref_model: org/model\ndataset: 'org/pairs:en#1000'\n"
    values = converted(tmp_path, text + "use_hf: true\nstrict: false\n", "--gpus", "4", name="dpo.yaml")
    assert values["method"] == "full"
    assert values["optim"] == {"lr": 1e-5, "weight_decay": 0.1, "beta2": 0.95}
    assert values["batch"] == {"samples_per_step": 16, "epochs": 3.0}
    assert values["data"] == {
        "sources": [{"path": "org/pairs", "subset": "en", "format": "preference"}],
        "num_samples": 1000,
        "max_tokens": None,
        "too_long": "drop",
        "on_bad_row": "skip",
    }
    assert "lora" not in values


@pytest.mark.parametrize(
    ("name", "path", "subset", "is_checked"),
    [
        ("HF::org/pairs:en", "org/pairs", "en", False),
        ("hf::org/pairs", "org/pairs", None, False),
        ("MS::org/pairs:en", "org/pairs", "en", True),
        ("org/pairs", "org/pairs", None, True),
        ("pairs.jsonl", "pairs.jsonl", None, False),
    ],
)
def test_a_data_set_names_its_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, path: str, subset: str | None, is_checked: bool
) -> None:
    text = yaml.safe_dump({"rlhf_type": "dpo", "model": "org/model", "use_hf": False, "dataset": name})
    (source,) = converted(tmp_path, text, name="dpo.yaml")["data"]["sources"]
    assert source == {"path": path, **({"subset": subset} if subset else {}), "format": "preference"}
    said = " ".join((tmp_path / "out.yaml").read_text().replace("#", "").split())
    assert ("CHECK dataset: an id of ModelScope there, of the Hugging Face hub here" in said) == is_checked
    (tmp_path / "out.yaml").unlink()
    with_hub = converted(tmp_path, text.replace("use_hf: false", "use_hf: true"), name="dpo.yaml")
    assert with_hub["data"]["sources"] == [source]
    said = (tmp_path / "out.yaml").read_text()
    assert ("CHECK dataset" in said) == name.startswith("MS::")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("rlhf_type: grpo", "grpo: this trains on answers that the model writes meanwhile (rollouts)"),
        ("rlhf_type: gkd", "rlhf_type: 'gkd' is not supported; flatout has dpo, cpo, simpo, orpo, kto, rm"),
        ("loss_type: hinge", "loss_type: 'hinge' is not one of sigmoid, robust, ipo"),
        ("{rlhf_type: orpo, loss_type: sigmoid}", "loss_type: orpo has one loss; remove it"),
        ("ref_model: org/other", "ref_model: the reference is the model before training; remove it"),
        ("adapters: sft", "adapters: the reference is the model as it begins: name one folder as adapters and ref_"),
        ("truncation_strategy: left", "truncation_strategy: a pair is never cut; write delete"),
        ("train_type: adalora", "train_type: 'adalora' is not supported; flatout trains lora and full"),
        ("{val_dataset: other, early_stop_interval: 3}", "val_dataset: it decides when training ends: build it with"),
        ("train_dataloader_shuffle: 2", "batch.shuffle"),
        ("dataset: ['a#5', 'b']", "dataset: a#5: data.num_samples counts the rows of all data sets"),
        ("ld_alpha: 0.5", "ld_alpha: not supported"),
        ("per_device_train_batch_size: auto", "per_device_train_batch_size is 'auto'; expected a number"),
        ("per_device_train_batch_size: [1, 2]", "per_device_train_batch_size is [1, 2]; expected a number"),
        ("external_plugins: own.py", "external_plugins: custom code is never run"),
        ("loss_scale: all", "loss_scale: only answers carry loss"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, message: str) -> None:
    values = {"rlhf_type": "dpo", "model": "org/model", "dataset": "org/pairs"} | yaml.safe_load(more)
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(values))
    assert main(["convert", str(tmp_path / "dpo.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_what_is_not_refused_beside_it(tmp_path: Path) -> None:
    adapters = "{adapters: [sft], ref_adapters: [sft], quant_method: bnb, quant_bits: 4, packing: false}"
    text = yaml.safe_dump({"rlhf_type": "dpo", "model": "org/model", "dataset": "a.jsonl"} | yaml.safe_load(adapters))
    values = converted(tmp_path, text, name="dpo.yaml")
    assert values["lora"]["continue_from"].endswith("sft")
    assert values["base"] == {"storage": "nf4"}
    # a loss without a reference begins at any adapter
    (tmp_path / "out.yaml").unlink()
    text = text.replace("dpo", "orpo").replace("ref_adapters:\n- sft\n", "")
    assert converted(tmp_path, text, name="dpo.yaml")["objective"]["kind"] == "orpo"


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_rows_of_ms_swift_train(tiny: Any, tmp_path: Path, kind: str) -> None:
    rows = []
    for k in range(8):
        turns = [{"role": "user", "content": f"What is {k}?"}, {"role": "assistant", "content": f"{k}."}]
        judged = {"rejected_response": "No."} if kind == "dpo" else {"label": k % 2 == 0}
        rows.append({"messages": turns, **judged})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"swift rlhf --rlhf_type {kind} --model {tiny.model_dir} --dataset {tmp_path}/rows.jsonl --max_length 200"
    words = [f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", "batch.max_steps=1", "device=cpu"]
    converted(tmp_path, f"{text} --gradient_accumulation_steps 4\n", *words, "data.template=chatml")
    assert main(["train", str(tmp_path / "out.yaml"), "model.precision=fp32"]) == 0


SFT = """\
nproc_per_node=2

CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --train_type lora \\
    --dataset 'org/one#500' 'org/two:en#30' \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --eval_steps 50 \\
    --save_steps 50 \\
    --max_length 2048 \\
    --output_dir output \\
    --system 'Be short.' \\
    --warmup_ratio 0.05 \\
    --model_author swift MORE
"""


def test_a_command_of_answers_becomes_a_run(tmp_path: Path) -> None:
    """The batch counts the ranks that the script starts, and its sums are worked out."""
    values = converted(tmp_path, SFT.replace("MORE", ""))
    system = {"system": "Be short."}
    assert values == {
        "run_dir": "output",
        "method": "lora",
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct", "precision": "bf16"},
        "data": {
            "sources": [
                {"path": "org/one", "split": "train[:500]", **system},
                {"path": "org/two", "split": "train[:30]", "subset": "en", **system},
            ],
            "max_tokens": 2048,
            "too_long": "drop",
        },
        "lora": {"rank": 8, "alpha": 32.0, "dropout": 0.05},
        "batch": {"samples_per_step": 32, "epochs": 1.0},
        "optim": {"lr": 1e-4, "beta2": 0.95, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.05},
        "checkpoint": {"every_steps": 50},
    }
    told = (tmp_path / "out.yaml").read_text()
    assert "# CHECK template: the tokenizer's own template stands in for it" in told
    assert "# CHECK dataset: which rows are drawn differs; an id of ModelScope there" in told


@pytest.mark.parametrize(
    ("more", "section", "expected"),
    [
        ("--loss_scale ignore_empty_think", "data", {"loss_type": "response_only", "empty_reasoning": "mask"}),
        ("--loss_scale all", "data", {"loss_type": "all"}),
        ("--truncation_strategy right", "data", {"too_long": "truncate"}),
        ("--deepspeed default-zero2", "strategy", "zero2"),
        ("--deepspeed conf/zero3_offload.json", "sharding", {"offload": True}),
        ("--train_dataloader_shuffle false", "batch", {"shuffle": False}),
        ("--split_dataset_ratio 0.1 --early_stop_interval 3", "eval", {"fraction": 0.1, "patience": 3}),
        ("--quant_method bnb --quant_bits 4", "base", {"storage": "nf4"}),
        ("--use_dora true", "lora", {"dora": True}),
        ("--freeze_vit false --freeze_aligner true", "model", {"freeze_vision_tower": False, "freeze_projector": True}),
    ],
)
def test_options_of_answers(tmp_path: Path, more: str, section: str, expected: Any) -> None:
    found = converted(tmp_path, SFT.replace("MORE", more))[section]
    assert found == (found | expected if isinstance(expected, dict) else expected)


def test_pretraining_is_plain_text(tmp_path: Path) -> None:
    text = (
        "swift pt --model ./base --train_type full --dataset docs.jsonl --max_steps 10 --packing true --max_length 64\n"
    )
    values = converted(tmp_path, text)
    assert values["method"] == "full"
    assert values["data"] == {
        "sources": [{"path": "docs.jsonl"}],
        "template": "plain",
        "loss_type": "all",
        "max_tokens": 64,
        "too_long": "drop",
    }
    assert values["optim"]["lr"] == 1e-5


@pytest.mark.parametrize(
    "start", ["python swift/cli/sft.py", "torchrun --nproc_per_node=2 -m swift.cli.sft", "swift sft"]
)
def test_however_it_is_started(tmp_path: Path, start: str) -> None:
    values = converted(tmp_path, f"{start} --model ./m --dataset a.jsonl --train_type lora\n")
    assert values["batch"]["samples_per_step"] == 16  # its default, whatever the ranks


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (SFT.replace("MORE", "--truncation_strategy left"), "truncation_strategy: 'left' is not supported"),
        (SFT.replace("MORE", "--loss_scale hermes"), "loss_scale: hermes is not supported: each token of every answer"),
        (SFT.replace("MORE", "--loss_scale last_round"), "loss_scale: last_round is not supported"),
        (SFT.replace("MORE", "--freeze_llm true"), "freeze_llm: the language model is trained"),
        (SFT.replace("MORE", "--template chatml2"), "template: 'chatml2' is not one of"),
        (SFT.replace("MORE", "").replace("org/one", "swift/self-cognition"), "write your model_name and model_author"),
        (SFT.replace("MORE", "").replace("org/one", "./one.jsonl"), "data.num_samples counts the rows of all data"),
        ("MAX_PIXELS=1000 swift sft --model org/m --dataset org/a\n",
         "max_pixels: pictures are read at the size of the processor"),
        # the ranks, or a value, that only the shell knows
        (SFT.replace("MORE", "").replace("=2\n", "=${GPUS:-8}\n").replace("$(expr 16 / $nproc_per_node)", "8"),
         "only the shell knows the ranks, $nproc_per_node; give --gpus N, of all nodes"),
        ("accelerate launch --config_file a.yaml swift/cli/sft.py --model m --dataset a.jsonl",
         "only the shell knows the ranks, in the --config_file of accelerate"),
        (SFT.replace("MORE", "--output_dir $OUT"), "--output_dir: the shell replaces $OUT"),
        (SFT.replace("MORE", "").replace("nproc_per_node=2\n", "if true; then\nnproc_per_node=2\nfi\n"),
         "the shell replaces $("),
        (SFT.replace("MORE", "").replace("nproc_per_node=2\n", "nproc_per_node=2\nnproc_per_node=4\n"),
         "the shell replaces $("),
    ],
)  # fmt: skip
def test_what_is_refused_of_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    (tmp_path / "sft.sh").write_text(script)
    assert main(["convert", str(tmp_path / "sft.sh")]) == 2
    assert message in capsys.readouterr().err


def test_ranks_that_the_shell_knows_can_be_given(tmp_path: Path) -> None:
    text = SFT.replace("MORE", "").replace("=2\n", "=${GPUS:-8}\n").replace("$(expr 16 / $nproc_per_node)", "8")
    assert converted(tmp_path, text, "--gpus", "4")["batch"]["samples_per_step"] == 64


def test_rows_of_answers_train(tiny: Any, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"b{i}"}]} for i in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"swift sft --model {tiny.model_dir} --dataset {tmp_path}/rows.jsonl --max_length 200"
    words = [f"data.root={tmp_path}", f"run_dir={tmp_path / 'run'}", "batch.max_steps=1", "device=cpu"]
    converted(tmp_path, f"{command} --gradient_accumulation_steps 4\n", *words, "data.template=chatml")
    assert main(["train", str(tmp_path / "out.yaml"), "model.precision=fp32"]) == 0
