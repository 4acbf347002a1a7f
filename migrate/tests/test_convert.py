"""`flatout convert`, as typed: files of Axolotl, LLaMA-Factory, TRL and TrainingArguments become configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.cli.main import main
from flatout.config.read import load_config

AXOLOTL = """\
base_model: org/model
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: chats.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
    train_on_eos: turn
val_set_size: 0.1
sequence_len: 512
sample_packing: true
dataset_exact_deduplication: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
bf16: auto
tf32: true
wandb_project:
special_tokens: {pad_token: <pad>}
output_dir: ./outputs/out
"""
LLAMA_FACTORY = """\
model_name_or_path: org/model
trust_remote_code: true
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: own, questions
template: llama3
cutoff_len: 1024
max_samples: 100
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
save_steps: 500
output_dir: saves
"""
TRL = """\
model_name_or_path: org/model
dataset_name: org/chats
dataset_config: all
dataset_train_split: train_sft
use_peft: true
lora_r: 32
lora_alpha: 16
learning_rate: 1.0e-4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
assistant_only_loss: true
max_length: 4096
gradient_checkpointing: true
chat_template: "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""


def converted(folder: Path, text: str, *words: str, name: str = "theirs.yaml") -> dict[str, Any]:
    """Convert a file; check that the result loads, and return it as plain values."""
    (folder / name).write_text(text)
    out = folder / "out.yaml"
    assert main(["convert", str(folder / name), "--to", str(out), *words]) == 0
    load_config(out)
    values = yaml.safe_load(out.read_text())
    assert isinstance(values, dict)
    return values


def problems(folder: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    (folder / "theirs.yaml").write_text(text)
    assert main(["convert", str(folder / "theirs.yaml"), *words]) == 2
    return capsys.readouterr().err


def test_axolotl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = converted(tmp_path, AXOLOTL, "--gpus", "2")
    assert values == {
        "run_dir": "outputs/out",
        "method": "lora",
        "model": {"name": "org/model"},
        "data": {
            "sources": [
                {
                    "path": "chats.jsonl",
                    "format": "messages",
                    "columns": {"messages": "conversations", "role": "from", "content": "value"},
                }
            ],
            "max_tokens": 512,
            "too_long": "drop",
            "dedupe": "exact",
        },
        "lora": {"rank": 8, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear"},
        "base": {"storage": "nf4"},
        "batch": {"samples_per_step": 16, "epochs": 2.0},
        "optim": {"name": "adamw8bit", "lr": 2e-4},
        "schedule": {"kind": "cosine", "warmup_ratio": 0.1},
        "eval": {"fraction": 0.1, "every_steps": 0.125},
        "checkpoint": {"every_steps": 0.5},
    }
    table = capsys.readouterr().out
    # every given name has its line of at most 80 columns
    assert all(any(line.startswith(f"{name} ") for line in table.splitlines()) for name in yaml.safe_load(AXOLOTL))
    assert max(map(len, table.split("wrote")[0].splitlines())) <= 80
    assert "# CHECK micro_batch_size: there, a packed row" in (tmp_path / "out.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rl: ipo_2", "rl: write dpo, ipo, simpo, orpo or kto"),
        ("reward_model: true", "reward_model: reward training is not supported"),
        ("processor_type: AutoProcessor", "processor_type: rows with pictures are not translated"),
        ("plugins: [axolotl.integrations.diffusion.DiffusionPlugin]", "plugins: axolotl.integrations.diffusion"),
        ("chat_template: gemma3", "chat_template: 'gemma3' is not one of chatml"),
        ("tensor_parallel_size: 2", "tensor_parallel_size: only data parallelism"),
        ("unheard_of: 1", "unheard_of: unknown here"),
        ("gptq: true", "gptq: adapters are LoRA"),
        ("warmup_steps: 5\nwarmup_steps: 6", "key 'warmup_steps' is given twice"),
        ("optim: adamw_torch", "optim: means the same as optimizer; keep one"),
        ("unfrozen_parameters: [lm_head]", "unfrozen_parameters: it names what to train"),
    ],
)
def test_axolotl_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    assert message in problems(tmp_path, f"{AXOLOTL}{change}\n", capsys)


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("{path: a/b, type: alpaca}", {"path": "a/b", "format": "alpaca"}),
        ("{path: a/b, name: en, split: 'train[:5%]', type: completion, field: body}",
         {"path": "a/b", "subset": "en", "split": "train[:5%]", "format": "text", "columns": {"text": "body"}}),
        ("{path: a/b, type: chat_template, roles: {user: [Human], assistant: [Bot]}}",
         {"path": "a/b", "format": "messages", "roles": {"Human": "user", "Bot": "assistant"}}),
        ("{path: a/b, type: input_output}", {"path": "a/b", "format": "segments"}),
        ("{path: a/b, type: chat_template, message_field_training: training, message_field_training_detail: spans}",
         {"path": "a/b", "format": "messages", "keys": {"spans": "train_detail"}}),
        ("{path: a/b, type: chat_template, message_field_training: learn}",
         {"path": "a/b", "format": "messages", "keys": {"learn": "train"}}),
    ],
)  # fmt: skip
def test_data_sets_of_axolotl(tmp_path: Path, entry: str, source: dict[str, Any]) -> None:
    text = f"base_model: m\nlearning_rate: 1e-4\nsequence_len: 64\ndatasets: [{entry}]\n"
    values = converted(tmp_path, text)
    assert values["data"]["sources"] == [source]
    assert values["method"] == "full"


@pytest.mark.parametrize("of_file", ["", "chat_template: llama3\n"])
def test_one_template_of_all_data_sets_is_that_of_the_file(tmp_path: Path, of_file: str) -> None:
    one, two = ("{path: %s, type: chat_template, chat_template: llama3}" % name for name in "ab")  # noqa: UP031
    start = f"base_model: m\nlearning_rate: 1e-4\nsequence_len: 64\n{of_file}"
    values = converted(tmp_path, f"{start}datasets: [{one}, {two}]\n")
    assert values["data"]["template"] == "llama-3"
    assert [source["path"] for source in values["data"]["sources"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("of_file", "of_other"),
    [("chat_template: chatml\n", "llama3"), ("", "chatml"), ("chat_template: llama3\n", "chatml")],
)
def test_data_sets_of_several_templates_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_file: str, of_other: str
) -> None:
    entries = ", ".join(f"{{path: a, type: chat_template, chat_template: {name}}}" for name in ("llama3", of_other))
    text = f"base_model: m\nlearning_rate: 1e-4\n{of_file}datasets: [{entries}]\n"
    assert "chat_template: set data.template for all sets" in problems(tmp_path, text, capsys)


@pytest.mark.parametrize(
    "entry", ["{path: a, type: sharegpt.load_role}", "{path: a, type: alpaca, shards: 2}", "a",
              "{path: a, type: {format: x}}",
              "{path: a, type: chat_template, roles_to_train: [user]}"],
)  # fmt: skip
def test_data_sets_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str) -> None:
    text = f"base_model: m\nlearning_rate: 1e-4\ndatasets: [{entry}]\n"
    assert "datasets: " in problems(tmp_path, text, capsys)


def write_dataset_info(folder: Path, **entries: Any) -> None:
    (folder / "data").mkdir()
    rows = [{"instruction": "a", "output": "b"}] * 3
    (folder / "data/own.json").write_text(json.dumps(rows))
    known = {
        "own": {"file_name": "own.json"},
        "questions": {
            "file_name": "own.json",
            "formatting": "sharegpt",
            "columns": {"messages": "turns", "tools": "tools"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "Frage", "assistant_tag": "Antwort"},
        },
        **entries,
    }
    (folder / "data/dataset_info.json").write_text(json.dumps(known))


def test_llamafactory(tmp_path: Path) -> None:
    write_dataset_info(tmp_path)
    values = converted(tmp_path, LLAMA_FACTORY)
    assert values["data"] == {
        "sources": [
            {"format": "alpaca", "path": str(tmp_path / "data/own.json")},
            {
                "format": "sharegpt",
                "path": str(tmp_path / "data/own.json"),
                "columns": {"messages": "turns", "tools": "tools", "from": "role", "value": "content"},
                "roles": {"Frage": "user", "Antwort": "assistant"},
            },
        ],
        "template": "llama-3",
        "max_tokens": 1024,
        "too_long": "truncate",
    }
    listed = yaml.safe_load(LLAMA_FACTORY) | {"dataset": ["own", "questions"]}
    (tmp_path / "out.yaml").unlink()
    assert converted(tmp_path, yaml.safe_dump(listed)) == values
    assert values["lora"] == {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
    assert values["batch"] == {"samples_per_step": 8, "epochs": 3.0}
    assert values["checkpoint"] == {"every_steps": 500, "resume": "never"}


def test_axolotls_tower_is_trained_where_it_is_there(tmp_path: Path) -> None:
    for frozen in (True, False):
        model = converted(tmp_path, f"{AXOLOTL}freeze_mm_modules: {str(frozen).lower()}\n", name=f"{frozen}.yaml")[
            "model"
        ]
        assert model.get("freeze_vision_tower", True) == model.get("freeze_projector", True) == frozen
        (tmp_path / "out.yaml").unlink()


@pytest.mark.parametrize(
    ("change", "model"),
    [
        ({"freeze_vision_tower": True, "freeze_multi_modal_projector": True}, {}),
        ({"freeze_vision_tower": False}, {"freeze_vision_tower": False}),
        # its adapters leave the projector alone
        ({"freeze_multi_modal_projector": False}, {}),
        ({"freeze_multi_modal_projector": False, "finetuning_type": "full"}, {"freeze_projector": False}),
    ],
)
def test_llamafactory_of_towers(tmp_path: Path, change: dict[str, Any], model: dict[str, Any]) -> None:
    write_dataset_info(tmp_path)
    given = yaml.safe_load(LLAMA_FACTORY) | change
    if given["finetuning_type"] == "full":
        given = {name: value for name, value in given.items() if not name.startswith("lora_")}
    found = converted(tmp_path, yaml.safe_dump(given))["model"]
    frozen = {name: value for name, value in found.items() if name.startswith("freeze_") and not value}
    assert frozen == model


# (a file of LLaMA-Factory that trains nothing, what its error names)
USES = [
    ("adapter_name_or_path: saves/a b\nexport_dir: out\nexport_size: 5", "flatout merge 'saves/a b' --out out"),
    ("adapter_name_or_path: saves/lora\ninfer_backend: vllm", "flatout chat saves/lora"),
    ("infer_backend: huggingface", "flatout chat org/model"),
    ("export_dir: out\nexport_quantization_bit: 4", "no single adapter is merged"),
    ("adapter_name_or_path: a,b\nexport_dir: out", "no single adapter is merged"),
]


@pytest.mark.parametrize(("text", "message"), USES)
def test_a_file_of_llamafactory_that_trains_nothing_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """With the translation of a training file, `--without` would write a run that trains the merged model."""
    shown = problems(tmp_path, f"model_name_or_path: org/model\ntemplate: llama3\n{text}", capsys)
    assert message in shown
    assert "--without" not in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("freeze_language_model: true", "freeze_language_model: set freeze to regexes"),
        ("stage: sft2", "stage: sft2 is not supported"),
        ("stage: dpo", "dataset: own: stage: dpo needs data sets with ranking: true"),
        ("{stage: dpo, dataset: pairs, pref_loss: hinge}", "pref_loss: 'hinge' is not one of sigmoid, ipo, orpo"),
        ("{stage: dpo, dataset: pairs, ref_model: org/m}", "ref_model: the reference is the model before training"),
        ("finetuning_type: oft", "finetuning_type: 'oft' is not supported"),
        ("dataset: missing", "dataset: 'missing' is not in"),
        ("dataset: [own, missing]", "dataset: 'missing' is not in"),
        ("dataset: pictures", "dataset: pictures: columns: images: pictures are read at the processor's own size"),
        ("dataset: films", "dataset: films: columns: videos: only text and pictures can be trained on"),
        ("dataset: pairs", "dataset: pairs: its rows compare or judge answers, for stage: dpo or rm"),
        ("max_samples: 2", "max_samples: it counts each data set"),
        ("template: qwen3_vl", "template: 'qwen3_vl' is not one of llama3"),
        ("quantization_bit: 8", "quantization_bit: only 4 bits"),
        ("packing: true", "packing: samples of a pack attend to each other"),
        ("use_galore: true", "use_galore: not supported"),
    ],
)
def test_llamafactory_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    pictures = {"file_name": "own.json", "columns": {"images": "images"}}
    films = {"file_name": "own.json", "columns": {"videos": "videos"}}
    write_dataset_info(tmp_path, pictures=pictures, films=films, pairs={"file_name": "own.json", "ranking": True})
    text = yaml.safe_dump(yaml.safe_load(LLAMA_FACTORY) | yaml.safe_load(change))
    assert message in problems(tmp_path, text, capsys)


@pytest.mark.parametrize(("model", "is_its_own"), [("Qwen/Qwen2.5-VL-3B-Instruct", True), ("Qwen/Qwen2.5-3B", False)])
def test_a_template_for_pictures_is_a_vision_models_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, is_its_own: bool
) -> None:
    write_dataset_info(tmp_path)
    settings = yaml.safe_load(LLAMA_FACTORY) | {"template": "qwen2_vl", "model_name_or_path": model}
    refused = "template: 'qwen2_vl' is not one of llama3"
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(settings))
    assert main(["convert", str(tmp_path / "old.yaml")]) == (0 if is_its_own else 2)
    assert (refused not in " ".join("".join(capsys.readouterr()).split())) == is_its_own


@pytest.mark.parametrize(
    ("change", "objective"),
    [
        ({}, {"kind": "dpo", "beta": 0.1, "sft_weight": 0.0}),
        ({"pref_beta": 0.3, "pref_ftx": 0.5, "dpo_label_smoothing": 0.1},
         {"kind": "dpo", "beta": 0.3, "sft_weight": 0.5, "label_smoothing": 0.1}),
        ({"pref_loss": "simpo", "pref_beta": 2, "simpo_gamma": 1},
         {"kind": "simpo", "beta": 2.0, "gamma": 1.0, "sft_weight": 0.0}),
        ({"pref_loss": "orpo", "simpo_gamma": 1}, {"kind": "orpo", "beta": 0.1, "sft_weight": 1.0}),
        ({"pref_loss": "ipo"}, {"kind": "ipo", "beta": 0.1, "sft_weight": 0.0}),
    ],
)  # fmt: skip
def test_llamafactory_of_pairs(tmp_path: Path, change: dict[str, Any], objective: dict[str, Any]) -> None:
    columns = {"messages": "conversations", "chosen": "good", "rejected": "bad"}
    pairs = {"file_name": "own.json", "formatting": "sharegpt", "ranking": True, "columns": columns}
    write_dataset_info(tmp_path, pairs=pairs)
    given = yaml.safe_load(LLAMA_FACTORY) | {"stage": "dpo", "dataset": "pairs"} | change
    values = converted(tmp_path, yaml.safe_dump(given))
    assert values["objective"] == objective
    (source,) = values["data"]["sources"]
    assert (source["format"], values["data"]["too_long"]) == ("preference", "drop")
    assert source["columns"] == {"messages": "conversations", "chosen": "good", "rejected": "bad"}


def test_trl(tmp_path: Path) -> None:
    values = converted(tmp_path, TRL)
    assert values["data"] == {
        "sources": [{"path": "org/chats", "subset": "all", "split": "train_sft"}],
        "template": str(tmp_path / "out.jinja"),
        "loss_type": "response_only",
        "max_tokens": 4096,
        "too_long": "truncate",
    }
    assert (tmp_path / "out.jinja").read_text() == yaml.safe_load(TRL)["chat_template"]
    # TRL's own defaults: dropout, PEFT's modules, 3 epochs of 8 samples, no warm-up
    assert values["lora"] == {"rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}
    assert values["batch"] == {"samples_per_step": 8, "epochs": 3.0}
    assert values["schedule"] == {"kind": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 0}


@pytest.mark.parametrize("name", ["eval_strategy", "evaluation_strategy"])
def test_trl_evaluates_on_a_set_that_has_to_be_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Evaluation changes no weight, so that the file is translated and says what is left to do."""
    text = TRL + f"{name}: steps\neval_steps: 100\n"
    assert "eval" not in converted(tmp_path, text)
    assert "# CHECK dataset_test_split: not evaluated yet: build it with" in (tmp_path / "out.yaml").read_text()
    # when it decides the end of training
    assert "dataset_test_split: it decides when training ends" in problems(
        tmp_path, text + "early_stopping_patience: 3\n", capsys, "--to", str(tmp_path / "o.yaml")
    )


def test_training_arguments_need_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"learning_rate": 1e-05, "output_dir": "out", "num_train_epochs": 1})
    (tmp_path / "args.json").write_text(text)
    assert main(["convert", str(tmp_path / "args.json")]) == 2
    assert "model: missing; every run needs it" in capsys.readouterr().err
    values = converted(tmp_path, text, "model.name=org/model", "data.name=chats", name="args.json")
    assert values["model"] == {"name": "org/model"}
    assert values["optim"]["lr"] == 1e-05


def test_names_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = AXOLOTL + "reward_model: true\ncurriculum_sampling: true\n"
    assert "2 problems" in problems(tmp_path, text, capsys)
    assert converted(tmp_path, text, "--without", "reward_model,curriculum_sampling")["method"] == "lora"
    assert "--without lr:" in problems(tmp_path, text, capsys, "--without", "lr")


def test_yaml_is_printed_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    assert main(["convert", str(tmp_path / "theirs.yaml"), "lora.rank=4"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["lora"]["rank"] == 4
    assert "sequence_len" in printed.err


@pytest.mark.parametrize(
    ("system", "name", "model"),
    [
        ("llama-factory", "qwen", "Qwen/Qwen2.5-7B-Instruct"),
        ("llama-factory", "qwen3", "Qwen/Qwen3-8B"),
        ("llama-factory", "mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("llama-factory", "deepseek3", "deepseek-ai/DeepSeek-V3"),
        ("axolotl", "gemma3", "google/gemma-3-1b-it"),
        ("axolotl", "phi_35", "microsoft/Phi-3.5-mini-instruct"),
    ],
)
def test_the_template_of_a_models_family_is_the_tokenizers_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str, name: str, model: str
) -> None:
    is_axolotl = system == "axolotl"
    change = {"base_model": model, "chat_template": name} if is_axolotl else {
        "model_name_or_path": model, "template": name}  # fmt: skip
    given = yaml.safe_load(AXOLOTL if is_axolotl else LLAMA_FACTORY) | change
    if not is_axolotl:
        write_dataset_info(tmp_path)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(given))
    out = tmp_path / "out.yaml"
    assert main(["convert", str(tmp_path / "theirs.yaml"), "--to", str(out)]) == 0, capsys.readouterr().err
    assert "template" not in yaml.safe_load(out.read_text())["data"]
    assert "stands in for it" in out.read_text()
    # the same name with a model of another family
    other = given | {"base_model" if is_axolotl else "model_name_or_path": "org/other"}
    assert f"{name!r} is not one of" in problems(tmp_path, yaml.safe_dump(other), capsys)


def test_refusals_come_first_and_the_command_that_leaves_them_out_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(f"{AXOLOTL}unheard_of: 1\nunfrozen_parameters: [lm_head]\n")
    assert main(["convert", "theirs.yaml", "--to", "out.yaml"]) == 2
    printed = capsys.readouterr()
    names = [line.split()[0] for line in printed.out.splitlines() if line[0] != " "]
    assert names[:2] == ["unheard_of", "unfrozen_parameters"]
    step = printed.err.splitlines()[-1].split("#")[0].split()
    assert step == ["try", "--without", "unheard_of,unfrozen_parameters"]
    assert main(["convert", "theirs.yaml", "--to", "out.yaml", *step[1:]]) == 0
    assert Path("out.yaml").exists()
    capsys.readouterr()
    assert main(["convert", "theirs.yaml", "--without", "unheard_of"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].split("#")[0].split() == step


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot tell which trainer it is for" in problems(tmp_path, "colour: blue\n", capsys)
    assert "is already in flatout's form" in problems(tmp_path, "model: {name: m}\n", capsys)
    assert "expected sections" in problems(tmp_path, "- 1\n", capsys)
    (tmp_path / "out.yaml").write_text("")
    assert "already exists" in problems(tmp_path, AXOLOTL, capsys, "--to", str(tmp_path / "out.yaml"))


@pytest.mark.parametrize("name", ["lora_r", "sequence_len", "report_to", "val_size", "evals_per_epoch", "run_name"])
def test_errors_know_the_names_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The suggestion is the setting that the translation uses."""
    from flatout.config.names import FOREIGN_NAMES

    (tmp_path / "run.yaml").write_text(f"model: m\n{name}: 1\n")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    assert f"{name}: unknown key; did you mean {FOREIGN_NAMES[name]}?" in capsys.readouterr().err


DPO = """\
model_name_or_path: org/model
dataset_name: org/pairs
use_peft: true
lora_r: 16
lora_dropout: 0.1
precompute_ref_log_probs: true
learning_rate: 5e-6
"""
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL's own defaults": ("", {"kind": "dpo", "beta": 0.1}),
    "robust": (
        "{loss_type: robust, label_smoothing: 0.1, beta: 0.3}",
        {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.1, "robust": True},
    ),
    "robust without wrong labels is dpo": ("loss_type: [robust]", {"kind": "dpo", "beta": 0.1}),
    "ipo": ("{loss_type: ipo, beta: 0.05}", {"kind": "ipo", "beta": 0.05}),
    "sigmoid_norm": ("{loss_type: sigmoid_norm, beta: 5}", {"kind": "dpo_norm", "beta": 5.0}),
    "a weighted sum": (
        "{loss_type: [sigmoid, sft], loss_weights: [1.0, 0.2]}", {"kind": "dpo", "beta": 0.1, "sft_weight": 0.2},
    ),
    "rpo_alpha": ("rpo_alpha: 0.5", {"kind": "dpo", "beta": 0.1, "sft_weight": 0.5}),
    "conservative": ("label_smoothing: 0.1", {"kind": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
    "trl-cpo": ("", {"kind": "cpo", "beta": 0.1, "sft_weight": 1.0}),
    "trl-cpo simpo": (
        "{loss_type: simpo, beta: 2, simpo_gamma: 1, cpo_alpha: 0}",
        {"kind": "simpo", "beta": 2.0, "gamma": 1.0, "sft_weight": 0.0},
    ),
    "trl-cpo simpo as it is": (
        "loss_type: simpo", {"kind": "simpo", "beta": 0.1, "gamma": 0.5, "sft_weight": 1.0},
    ),
    "trl-orpo": ("beta: 0.2", {"kind": "orpo", "beta": 0.2}),
    "trl-reward": ("center_rewards_coefficient: 0.01", {"kind": "reward", "centering": 0.01}),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_losses_of_trl(tmp_path: Path, case: str) -> None:
    change, objective = PAIRS[case]
    system = case.split()[0] if case.startswith("trl-") else "trl-dpo"
    values = converted(tmp_path, yaml.safe_dump(yaml.safe_load(DPO) | (yaml.safe_load(change) or {})), "--from", system)
    assert values["objective"] == objective
    assert values["data"] == {
        "sources": [{"path": "org/pairs", "split": "train", "format": "preference"}],
        "max_tokens": 1024,
        "too_long": "drop",
    }
    # disable_dropout is on there, also for adapters
    assert values["lora"]["dropout"] == 0.0
    assert values["optim"]["lr"] == 5e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss_type: hinge", "loss_type: 'hinge' is not one of sigmoid, robust, ipo, sigmoid_norm"),
        ("loss_type: [sigmoid, ipo]", "loss_type: ['sigmoid', 'ipo'] is not one of sigmoid"),
        ("{loss_type: [sigmoid, sft], loss_weights: [0.5, 1]}", "loss_weights: the weight of sigmoid is 0.5; write 1"),
        ("sync_ref_model: true", "sync_ref_model: a reference that follows the model is not supported"),
        ("f_divergence_type: js_divergence", "f_divergence_type: only reverse_kl is supported"),
        ("reference_free: true", "reference_free: the loss has a reference"),
        ("ld_alpha: 0.5", "ld_alpha: not supported"),
        ("ref_model: org/other", "ref_model: the reference is the model before training"),
    ],
)
def test_losses_of_trl_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    text = yaml.safe_dump(yaml.safe_load(DPO) | yaml.safe_load(change))
    assert message in problems(tmp_path, text, capsys)


def test_what_is_off_or_unread_is_no_refusal(tmp_path: Path) -> None:
    more = "{sync_ref_model: false, ref_model_sync_steps: 64, f_divergence_type: reverse_kl, disable_dropout: false, "
    more += "max_prompt_length: 512, generate_during_eval: true, metric_for_best_model: eval_rewards/accuracies}"
    values = converted(tmp_path, yaml.safe_dump(yaml.safe_load(DPO) | yaml.safe_load(more)), "eval.fraction=0.1")
    assert values["lora"]["dropout"] == 0.1
    assert values["eval"]["best"] == "rewards/accuracies"


def test_the_trainer_of_a_file_that_names_none_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model_name_or_path: org/model\ndataset_name: org/pairs\nbeta: 0.2\n"
    assert "beta is read by several trainers of TRL; name yours by --from trl-dpo|trl-cpo" in problems(
        tmp_path, text, capsys
    )
    assert converted(tmp_path, text, "--from", "trl-orpo")["objective"] == {"kind": "orpo", "beta": 0.2}
    (tmp_path / "out.yaml").unlink()
    assert converted(tmp_path, text + "loss_type: ipo\n")["objective"] == {"kind": "ipo", "beta": 0.2}


@pytest.mark.parametrize(
    "start", ["trl dpo --config more.yaml", "accelerate launch --num_processes 1 trl/scripts/dpo.py --config more.yaml"]
)
def test_a_command_of_trl(tmp_path: Path, start: str) -> None:
    (tmp_path / "more.yaml").write_text("dataset_name: org/pairs\nbeta: 0.5\n")
    text = f"#!/bin/bash\nexport A=1\n{start} \\\n  --model_name_or_path org/model --use_peft \\\n"
    text += "  --beta=0.3 --loss_type sigmoid sft --loss_weights 1 0.1 # loss\n"
    values = converted(tmp_path, text, name="run.sh")
    assert values["objective"] == {"kind": "dpo", "beta": 0.3, "sft_weight": 0.1}
    assert (values["method"], values["model"]["name"]) == ("lora", "org/model")


@pytest.mark.parametrize(
    ("change", "objective"),
    [
        ("rl: dpo", {"kind": "dpo", "beta": 0.1}),
        ("{rl: dpo, rl_beta: 0.2, dpo_label_smoothing: 0.1, rpo_alpha: 1}",
         {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.1, "sft_weight": 1.0}),
        ("{rl: ipo, rl_beta: 0.2}", {"kind": "ipo", "beta": 0.2}),
        ("{rl: simpo, rl_beta: 2, simpo_gamma: 1.2, cpo_alpha: 0.5}",
         {"kind": "simpo", "beta": 2.0, "gamma": 1.2, "sft_weight": 0.5}),
        ("{rl: orpo, orpo_alpha: 0.3}", {"kind": "orpo", "beta": 0.3}),
    ],
)  # fmt: skip
def test_rl_of_axolotl(tmp_path: Path, change: str, objective: dict[str, Any]) -> None:
    pairs = {
        "path": "a/b", "type": "chat_template.default", "field_messages": "turns", "field_chosen": "good",
        "field_rejected": "bad", "split": "train",
    }  # fmt: skip
    given = yaml.safe_load(AXOLOTL) | {"datasets": [pairs]} | yaml.safe_load(change)
    del given["val_set_size"]
    values = converted(tmp_path, yaml.safe_dump(given))
    assert values["objective"] == objective
    columns = {"messages": "turns", "chosen": "good", "rejected": "bad"}
    (source,) = values["data"]["sources"]
    assert source == {"path": "a/b", "format": "preference", "split": "train", "columns": columns}
    assert values["data"]["too_long"] == "drop"
    intel = {**given, "datasets": [{"path": "a/b", "type": "chatml.intel"}]}
    (tmp_path / "out.yaml").unlink()
    assert converted(tmp_path, yaml.safe_dump(intel))["data"]["template"] == "chatml"


@pytest.mark.parametrize("kind", ["zephyr.nectar", "user_defined.default", "chat_template", "chatml.default"])
def test_rows_of_rl_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    given = yaml.safe_load(AXOLOTL) | {"rl": "dpo", "datasets": [{"path": "a/b", "type": kind}]}
    assert f"datasets: type '{kind}' is not supported" in problems(tmp_path, yaml.safe_dump(given), capsys)


def test_kto_of_every_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objective = {"kind": "kto", "beta": 0.1, "desirable_weight": 1.5}
    values = converted(tmp_path, DPO + "desirable_weight: 1.5\n")
    assert values["objective"] == objective
    assert values["data"]["sources"][0]["format"] == "kto"
    (tmp_path / "out.yaml").unlink()
    given = yaml.safe_load(AXOLOTL) | {"rl": "kto", "kto_desirable_weight": 1.5}
    given["datasets"] = [{"path": "a/b", "type": "llama3.intel"}]
    values = converted(tmp_path, yaml.safe_dump(given))
    assert values["objective"] == objective
    assert (values["data"]["sources"], values["data"]["template"]) == ([{"path": "a/b", "format": "kto"}], "llama-3")
    (tmp_path / "out.yaml").unlink()
    columns = {"messages": "messages", "kto_tag": "label"}
    write_dataset_info(tmp_path, tagged={"file_name": "own.json", "formatting": "sharegpt", "columns": columns})
    given = yaml.safe_load(LLAMA_FACTORY) | {"stage": "kto", "dataset": "tagged", "kto_chosen_weight": 1.5}
    values = converted(tmp_path, yaml.safe_dump(given | {"pref_ftx": 0.0}))
    assert values["objective"] == objective
    assert values["data"]["sources"][0]["format"] == "kto"
    # their KTO adds it to the loss
    found = problems(tmp_path, yaml.safe_dump(given | {"pref_ftx": 0.1}), capsys)
    assert "pref_ftx: kto has no cross-entropy of the good answers beside its loss here; write 0" in found


def test_llamafactory_of_rewards(tmp_path: Path) -> None:
    write_dataset_info(tmp_path, pairs={"file_name": "own.json", "ranking": True})
    given = yaml.safe_load(LLAMA_FACTORY) | {"stage": "rm", "dataset": "pairs"}
    values = converted(tmp_path, yaml.safe_dump(given))
    assert values["objective"] == {"kind": "reward"}
    assert values["data"]["sources"][0]["format"] == "preference"


# names of public files that change no step, or have a setting of flatout: the system, the names, what becomes of them
HARMLESS: list[tuple[str, str, dict[str, Any]]] = [
    ("axolotl", "{eval_max_new_tokens: 128, eval_table_size: 2, do_causal_lm_eval: true, device_map: auto}", {}),
    ("axolotl", "{use_kernels: true, liger_rms_norm_gated: true, quantize_moe_experts: true}", {}),
    ("axolotl", "{plugins: [axolotl.integrations.kernels.KernelsPlugin]}", {}),
    ("axolotl", "{model_type: Llama4ForConditionalGeneration}", {}),
    ("axolotl", "{model_config: {output_router_logits: true}}", {"experts": {"balance_loss": "model"}}),
    ("axolotl", "{deepspeed: deepspeed_configs/zero2.json}", {"strategy": "zero2"}),
    ("axolotl", "{test_datasets: [{path: held.jsonl}]}", {}),
    ("llama", "{enable_v1_kernels: true, use_v1_kernels: true, streaming: true}", {}),
    ("llama", "{eval_dataset: questions, eval_strategy: steps, eval_steps: 5}", {}),
    ("llama", "{deepspeed: examples/deepspeed/ds_z3_offload_config.json}",
     {"strategy": "zero3", "sharding": {"offload": True}}),
    ("llama", "{model_name_or_path: out/sft/best, template: qwen}", {"model": {"name": "out/sft/best"}}),
    ("trl", "{preprocessing_num_workers: 4, use_liger: true, wandb_entity: me, benchmarks: [gpqa]}", {}),
    ("trl", "{push_to_hub: true, callbacks: [push_to_hub_revision], eos_token: <|im_end|>}", {}),
    ("trl", "{tokenizer_name_or_path: org/model}", {}),
    ("trl", "{tokenizer_name_or_path: org/other}", {"data": {"tokenizer": "org/other"}}),
    ("trl", "{dataset_config: null, dataset_configs: [all]}", {}),
    ("trl", "{dataset_name: null, dataset_config: null, dataset_train_split: null, "
     "dataset_mixer: {org/a: 1.0, org/b: 1}, dataset_splits: [train_sft, test_sft]}",
     {"data": {"sources": [{"path": "org/a", "split": "train_sft"}, {"path": "org/b", "split": "train_sft"}]}}),
]  # fmt: skip


def of_system(folder: Path, system: str, change: str) -> str:
    """Return a file of a system with a few names changed."""
    if system == "llama":
        write_dataset_info(folder)
    text = {"axolotl": AXOLOTL, "llama": LLAMA_FACTORY, "trl": TRL}[system]
    return yaml.safe_dump(yaml.safe_load(text) | yaml.safe_load(change))


@pytest.mark.parametrize(("system", "change", "expected"), HARMLESS)
def test_what_changes_no_step_is_not_refused(
    tmp_path: Path, system: str, change: str, expected: dict[str, Any]
) -> None:
    values = converted(tmp_path, of_system(tmp_path, system, change))
    for name, value in expected.items():
        assert values[name] == (values[name] | value if isinstance(value, dict) else value)


@pytest.mark.parametrize(
    ("system", "change", "message"),
    [
        ("axolotl", "model_config: {rope_theta: 1}", "model_config: rope_theta: unknown here"),
        ("axolotl", "deepspeed: conf/own.json", "deepspeed: conf/own.json: the file is missing"),
        ("axolotl", "{test_datasets: [{path: a}], early_stopping_patience: 2}", "test_datasets: it decides when"),
        ("llama", "do_predict: true", "do_predict: it writes answers and trains nothing"),
        ("llama", "{model_name_or_path: org/other, template: qwen}", "template: 'qwen' is not one of llama3"),
        ("llama", "{model_name_or_path: out/llama/best, template: qwen}", "template: 'qwen' is not one of llama3"),
        ("trl", "callbacks: [mine]", "callbacks: 'mine' is not known; pass callbacks to flatout.train"),
        ("trl", "{dataset_mixer: {org/a: 0.5}}", "org/a: the first rows of a data set are not taken"),
        ("trl", "{dataset_mixer: {org/a: 1}, dataset_splits: all}", "dataset_splits: none has train in its name"),
        ("trl", "{dataset_config: null, dataset_configs: [a, b]}", "dataset_configs: name one of one data set"),
    ],
)  # fmt: skip
def test_what_changes_steps_is_refused_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str, change: str, message: str
) -> None:
    printed = problems(tmp_path, of_system(tmp_path, system, change), capsys, "--to", str(tmp_path / "out.yaml"))
    assert message in printed


@pytest.mark.parametrize(
    ("system", "change"),
    [
        ("axolotl", "{datasets: null, pretraining_dataset: [{path: a}]}"),
        ("axolotl", "processor_type: AutoProcessor"),
        ("llama", "{do_predict: true, predict_with_generate: true}"),
        ("trl", "{dataset_mixer: {org/a: 0.5}}"),
    ],
)
def test_no_step_leaves_out_what_a_run_is_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str, change: str
) -> None:
    """A file without its data, or one of answers, is not offered as another run."""
    assert "--without" not in problems(
        tmp_path, of_system(tmp_path, system, change), capsys, "--to", str(tmp_path / "o")
    )


@pytest.mark.parametrize(
    ("system", "change", "told"),
    [
        ("axolotl", "{warmup_ratio: null}", "CHECK warmup_ratio: 3 % of the run as here, but there at most 100 steps"),
        ("llama", "{}", "CHECK stage: of a row over cutoff_len, its prompt is cut too there"),
        ("llama", "{stage: dpo, dataset: pairs, adapter_name_or_path: sft}",
         "CHECK adapter_name_or_path: the reference is the model without this adapter there"),
        ("trl", "{push_to_hub: true}", "CHECK push_to_hub: not uploaded: push the finished run"),
    ],
)  # fmt: skip
def test_what_is_not_equal_is_told(tmp_path: Path, system: str, change: str, told: str) -> None:
    text = of_system(tmp_path, system, change)
    if system == "llama":
        known = json.loads((tmp_path / "data/dataset_info.json").read_text())
        pairs = {"file_name": "own.json", "ranking": True}
        (tmp_path / "data/dataset_info.json").write_text(json.dumps({**known, "pairs": pairs}))
    converted(tmp_path, text)
    assert told in (tmp_path / "out.yaml").read_text()


def test_a_deepspeed_file_that_is_here_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ds_z3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    values = converted(tmp_path, of_system(tmp_path, "llama", "{deepspeed: ds_z3.json, finetuning_type: full}"))
    assert values["strategy"] == "deepspeed"


def test_pairs_of_chats_of_axolotl(tmp_path: Path) -> None:
    change = "{rl: orpo, val_set_size: 0, datasets: [{path: a/b, type: chat_template.argilla}]}"
    assert converted(tmp_path, of_system(tmp_path, "axolotl", change))["objective"]["kind"] == "orpo"


# what is there is said of a name, in words that are true of it
REASONS = {
    "axolotl": (
        "base_model: m\ndatasets: [{path: d.jsonl, type: chat_template}]\n",
        {
            "strict: true": "an unknown name is always an error here",
            "dataset_prepared_path: x": "tokens are kept in data.root by the content of rows and settings",
            "dataset_processes: 4": "data.num_procs is the number of processes here",
            "debug: true": "flatout data show",
            "eval_batch_size: 4": "an exact mean",
            "eval_table_max_new_tokens: 128": "trains nothing; test the finished run with `flatout eval`",
            "mlflow_tracking_uri: http://x": "trains nothing; track.to sends the run there",
            "use_swanlab: true": "trains nothing; flatout sends no figures there",
            "swanlab_api_key: hidden": "trains nothing; flatout sends no figures there",
            "sample_packing: true": "kernels and packing are automatic",
        },
    ),
    "llama-factory": (
        LLAMA_FACTORY.replace("template: llama3\n", ""),
        {
            "swanlab_project: x": "trains nothing; flatout sends no figures there",
            "overwrite_cache: true": "tokens are kept in data.root",
            "plot_loss: true": "figures are always recorded",
            "upcast_layernorm: true": "norms and the loss are computed in fp32",
            "temperature: 0.7": "only read when it answers",
        },
    ),
    "trl": (
        "model_name_or_path: m\ndataset_name: d\n",
        {
            "pad_token: x": "there is no padding",
            "torchdynamo: inductor": "speed only",
            "debug: underflow_overflow": "trains nothing",
            "report_to: [swanlab, wandb]": "CHECK: no figures are sent to swanlab; there are tensorboard, wandb",
        },
    ),
}


@pytest.mark.parametrize("system", REASONS)
def test_what_trains_nothing_is_dropped_with_a_reason_that_is_true_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str
) -> None:
    text, reasons = REASONS[system]
    for name in ("own", "questions"):
        (tmp_path / f"{name}.json").write_text("[]")
    entries = {name: {"file_name": f"{name}.json", "formatting": "alpaca"} for name in ("own", "questions")}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    if system == "llama-factory":
        text += f"dataset_dir: {tmp_path}\n"
    plain = converted(tmp_path, text, "--from", system)
    capsys.readouterr()
    (tmp_path / "out.yaml").unlink()
    kept = [line for line in text.splitlines() if line.split(":")[0] not in {one.split(":")[0] for one in reasons}]
    values = converted(tmp_path, "\n".join([*kept, *reasons]), "--from", system)
    table = capsys.readouterr().out
    assert "hidden" not in table
    if system == "trl":
        assert values.pop("track") == {"to": ["wandb"]}
    assert values == plain
    entries_shown: list[str] = []
    for line in table.splitlines():
        if line[:1].strip():
            entries_shown.append(line)
        else:
            entries_shown[-1] += f" {line.strip()}"
    for line, reason in reasons.items():
        name = line.split(":")[0]
        (shown,) = [one for one in entries_shown if one.split()[0] == name]
        assert reason in shown


@pytest.mark.parametrize(
    ("system", "text", "targets"),
    [
        ("trl", "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nlora_target_modules: [q_proj]\n", ["q_proj"]),
        ("trl", "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nlora_target_modules: all\n", "all"),
        ("axolotl", "base_model: m\nadapter: lora\ndatasets: [{path: d, type: chat_template}]\n", None),
        ("axolotl", AXOLOTL, "all-linear"),
    ],
)  # fmt: skip
def test_fused_experts_get_adapters_beside_the_linear_layers(
    tmp_path: Path, system: str, text: str, targets: Any
) -> None:
    values = converted(tmp_path, text, "--from", system)
    assert values["lora"].get("targets") == targets
    (tmp_path / "out.yaml").unlink()
    values = converted(tmp_path, text + "lora_target_parameters: [mlp.experts.gate_up_proj]\n", "--from", system)
    named = [targets] if isinstance(targets, str) else targets or []
    assert values["lora"]["targets"] == [*named, "mlp.experts.gate_up_proj"]


def test_one_adapter_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "own.json"}}))
    text = f"model_name_or_path: m\nstage: sft\ndataset: own\ndataset_dir: {tmp_path}\nadapter_name_or_path: "
    assert "adapter_name_or_path: one adapter is trained on" in problems(tmp_path, text + "a,b\n", capsys)
    assert converted(tmp_path, text + "a\n")["lora"]["continue_from"] == "a"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grpo.yaml", "model_name_or_path: m\ndataset_name: d\nbeta: 0.04\nnum_generations: 8\n"),
        ("axolotl.yaml", "base_model: m\nrl: grpo\n"),
        ("stage.yaml", "model_name_or_path: m\nstage: ppo\n"),
        ("run.sh", "trl rloo --model_name_or_path m\n"),
        ("swift.sh", "swift rlhf --rlhf_type grpo --model m\n"),
        ("train.py", "from trl import OnlineDPOConfig\nOnlineDPOConfig('o')\n"),
    ],
)
def test_training_on_rollouts_is_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["convert", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert "this trains on answers that the model writes meanwhile (rollouts), which flatout does not do" in said
    assert "trl-dpo" not in said


@pytest.mark.parametrize("suffix", [".py", ".jsonl", ".json", ".sh"])
def test_yaml_is_written_into_no_file_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    for words in (["init"], ["convert", str(tmp_path / "theirs.yaml"), "--to"]):
        out = tmp_path / f"{words[0]}{suffix}"
        assert main([*words, str(out)]) == 2
        assert not out.exists()
        said = capsys.readouterr().err
        assert f"a configuration is YAML; name it {out.with_suffix('.yaml')}" in said
        assert main([*words, str(out.with_suffix(".yaml"))]) == 0
        assert out.with_suffix(".yaml").exists()
