"""`flatout convert` of shell scripts with TRL's command: the options are those that the shell would pass to TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.cli.main import main
from flatout.config.read import load_config

START = "trl dpo --model_name_or_path org/model --dataset_name org/pairs --use_peft"
LAST = "--lora_target_modules q_proj v_proj"


def convert(folder: Path, script: str) -> int:
    """Convert a script by the command line and return its exit code."""
    (folder / "run.sh").write_text(script)
    return main(["convert", str(folder / "run.sh"), "--to", str(folder / "out.yaml")])


@pytest.mark.parametrize(
    ("script", "setting", "value"),
    [
        (f"{START} {LAST}\necho finished\n", "lora.targets", ["q_proj", "v_proj"]),
        (f"{START} {LAST} && echo done\n", "lora.targets", ["q_proj", "v_proj"]),
        (f"{START} {LAST} &\nwait\n", "lora.targets", ["q_proj", "v_proj"]),
        (f"{START} {LAST}; echo done", "lora.targets", ["q_proj", "v_proj"]),
        (f"({START} {LAST})", "lora.targets", ["q_proj", "v_proj"]),
        (f"{START} {LAST}#1 # q_proj", "lora.targets", ["q_proj", "v_proj#1"]),
        (f"{START} --learning_rate 5e-6 2>&1 | tee train.log", "optim.lr", 5e-6),
        (f"{START} --learning_rate 5e-6 &> log.txt", "optim.lr", 5e-6),
        # what is behind the file of a redirection is still of the command
        (f"{START} {LAST} >> log.txt 2>/dev/null --learning_rate 5e-6", "optim.lr", 5e-6),
        (f"{START} --num_train_epochs 2 > log.txt", "batch.epochs", 2.0),
        (f"mkdir -p out/dpo # that's new\nexport N=$(nproc)\n{START} --learning_rate 5e-6", "optim.lr", 5e-6),
        (f"{START} \\\r\n  --learning_rate \\\r\n 5e-6 # don't\r\necho 5\r\n", "optim.lr", 5e-6),
        (f"{START} --output_dir=runs/'$a  b'\"\\$c;\"\\ d\\\n/e", "run_dir", "runs/$a  b$c; d/e"),
        (f"CUDA_VISIBLE_DEVICES=$GPU uv run env/bin/{START} --learning_rate 5e-6", "optim.lr", 5e-6),
    ],
)
def test_only_the_trainers_own_words_are_read(tmp_path: Path, script: str, setting: str, value: Any) -> None:
    assert convert(tmp_path, script) == 0
    found = yaml.safe_load((tmp_path / "out.yaml").read_text())
    for name in setting.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    "between",
    [
        'if [ "$BIG" = 1 ]; then LR=5e-6; fi', "for LR in 1e-5 2e-5; do", 'read -p "lr? " LR', "declare LR=3e-4",
        '[ "$BIG" = 1 ] && export LR=5e-5 BIGGER', "unset LR", "source settings.sh", "while getopts l: LR; do",
    ],
)  # fmt: skip
def test_a_variable_that_may_be_set_again_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], between: str
) -> None:
    script = "LR=1e-5\n{}\n" + f"{START} --learning_rate $LR\n"
    assert convert(tmp_path, script.format(between)) == 2
    assert "--learning_rate: the shell replaces $LR" in capsys.readouterr().err
    assert convert(tmp_path, script.format("export OTHER=1")) == 0
    assert load_config(tmp_path / "out.yaml").optim.lr == 1e-5


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        ("if [ $BIG = 1 ]; then\nNPROC_PER_NODE=8\nelse\nNPROC_PER_NODE=2\nfi", [], "only the shell knows the ranks"),
        ("NPROC_PER_NODE=0", [], "0 GPUs; give --gpus N"),
        ("NPROC_PER_NODE=2", ["--gpus", "-2"], "-2 GPUs; give --gpus N"),
        ("NPROC_PER_NODE=$N", ["--gpus", "0"], "0 GPUs; give --gpus N"),
    ],
)
def test_ranks_are_known_and_at_least_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str, options: list[str], message: str
) -> None:
    (tmp_path / "run.sh").write_text(f"{start}\nswift sft --model org/m --dataset rows.jsonl --train_type lora\n")
    command = ["convert", str(tmp_path / "run.sh")]
    assert main([*command, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--gpus", "2"]) == 0
    assert "2 GPUs" in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    ("beside", "here"),
    [
        ("swift export --adapters output/last --merge_lora true", "see flatout export"),
        ("CUDA_VISIBLE_DEVICES=0 swift infer --adapters $OUT --stream true", "see flatout chat"),
        ("swift eval --model output", "see flatout eval"),
        ("trl vllm-serve --model org/model", "it does not train"),
    ],
)
def test_a_command_that_trains_nothing_is_named_and_the_trainer_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: str, here: str
) -> None:
    name = " ".join(beside.removeprefix("CUDA_VISIBLE_DEVICES=0 ").split()[:2])
    assert convert(tmp_path, f"swift rlhf --model org/model --dataset a.jsonl\n{beside}\n") == 0
    assert load_config(tmp_path / "out.yaml").objective.kind == "dpo"
    said = " ".join(capsys.readouterr().out.split())
    assert f"{name} not converted: it does not train" in said
    assert here in said
    (tmp_path / "out.yaml").unlink()
    assert convert(tmp_path, beside) == 2
    assert f"{name} is not supported; expected a command such as" in capsys.readouterr().err
    # two that train stay two runs
    assert convert(tmp_path, f"swift rlhf --model org/model\n{beside}\nswift sft --model org/model") == 2
    assert "starts swift rlhf and swift sft; a configuration is of one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            f"{START}\ntrl sft --model_name_or_path org/other",
            "starts trl dpo and trl sft; a configuration is of one run",
        ),
        (f"{START} && accelerate launch examples/sft.py", "starts trl dpo and trl sft; a configuration is of one run"),
        (f"{START}\ntrl grpo --beta 1", "starts trl dpo and trl grpo; a configuration is of one run"),
        ("trl grpo --beta 1", "grpo: this trains on answers that the model writes meanwhile (rollouts)"),
        ("echo dpo", "starts no trainer; expected a command such as `trl dpo"),
        (f"{START} --output_dir $OUT/x", "--output_dir: the shell replaces $OUT; write what it stands for"),
        (f'{START} --output_dir="a/${{OUT:-x}}"', "--output_dir: the shell replaces ${OUT:-x}; write"),
        (f"{START} --seed $(date +%s)", "--seed: the shell replaces $(date +%s); write"),
        (f"{START} --seed `date +%s`", "--seed: the shell replaces `date +%s`; write"),
        (f'{START} "$@"', "--use_peft: the shell replaces $@; write"),
        (f"{START} --output_dir ~/runs", "--output_dir: the shell replaces ~/runs; write"),
        (f"{START} --run_name it's", "run.sh:1: ' is opened and not closed"),
        (f'# a run\n{START} --run_name "it', 'run.sh:2: " is opened and not closed'),
        (f"{START} {LAST}\n  --learning_rate 5e-6", "run.sh:2: --learning_rate starts a command; end the line before"),
        (f"{START} --run_name '[a'", "--run_name: '[a' is not valid YAML"),
        (f"{START} --run_name 2024-13-45", "--run_name: '2024-13-45' is not valid YAML"),
        ("trl dpo more.yaml", "trl dpo more.yaml: expected an option such as --learning_rate"),
        (f"{START} --config", "--config: expected one file, found True"),
        (f"{START} --config missing.yaml", "missing.yaml: no such file"),
    ],
)
def test_what_only_the_shell_knows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    assert convert(tmp_path, script) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.yaml").exists()


def test_files_that_hold_no_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.json").write_text("[1]")
    (tmp_path / "latin.sh").write_bytes(b"# caf\xe9\n" + START.encode())
    for name, message in {
        "missing.sh": "no such file",
        "latin.sh": ":1: cannot be read as a configuration: it is not UTF-8",
        "rows.json": "expected a JSON object of names and values",
    }.items():
        assert main(["convert", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
