"""`flatout convert`, as typed: files and commands of other trainers become configurations, or are refused by name.

conversions.jsonl has a case a line: the `files` of a folder, the `words` after `flatout convert`, and what comes of
them: `settings` and the names that are marked CHECK (`checks`); or the names of all `problems`, what an error of the
whole file `says`, and whether a fix `leaves_out` names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from usual import every

from flatout.cli.main import main
from flatout.config.read import load_config

CASES = [json.loads(line) for line in Path(__file__).with_name("conversions.jsonl").read_text().splitlines()]
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_conversions(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in case["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    code = main(["convert", *case["words"], "--to", "out.yaml"])
    printed = capsys.readouterr()
    assert not Path("CANARY").exists()  # which scripts would write if they ran
    if "settings" in case:
        assert code == 0, printed.err
        text = Path("out.yaml").read_text()
        assert yaml.safe_load(text) == case["settings"]
        load_config(Path("out.yaml"))
        checked = [line.removeprefix("# CHECK ").split(":")[0] for line in text.splitlines() if "# CHECK" in line]
        assert checked == case["checks"]
        return
    assert code == 2
    named = [line.removeprefix("  - ").split(":")[0] for line in printed.err.splitlines() if line.startswith("  - ")]
    assert named == case["problems"]
    assert all(word in printed.err for word in case.get("says", ()))
    assert ("--without" in printed.err) == case["leaves_out"]
    assert not Path("out.yaml").exists()


def test_every_name_has_a_line_of_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL + "swanlab_api_key: hidden\n")
    assert main(["convert", str(tmp_path / "theirs.yaml"), "--to", str(tmp_path / "out.yaml")]) == 0
    table = capsys.readouterr().out.split("wrote")[0].splitlines()
    assert all(any(line.startswith(f"{name} ") for line in table) for name in yaml.safe_load(AXOLOTL))
    assert max(map(len, table)) <= 80
    assert not any("hidden" in line for line in table)


def test_the_text_of_a_template_is_written_beside_the_configuration(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    theirs = {"model_name_or_path": "m", "dataset_name": "d", "chat_template": template}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    assert main(["convert", str(tmp_path / "theirs.yaml")]) == 2
    assert main(["convert", str(tmp_path / "theirs.yaml"), "--to", str(tmp_path / "out.yaml")]) == 0
    assert (tmp_path / "out.jinja").read_text() == template
    assert load_config(tmp_path / "out.yaml").data.template == str(tmp_path / "out.jinja")


def test_a_command_that_trains_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "swift rlhf --model org/model --dataset a.jsonl\nswift export --adapters output/last --merge_lora true\n"
    (tmp_path / "run.sh").write_text(script)
    assert main(["convert", str(tmp_path / "run.sh"), "--to", str(tmp_path / "out.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "swift export not converted" in said
    assert "flatout export" in said


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.sh").write_bytes(b"# caf\xe9\ntrl dpo --model_name_or_path m")
    assert main(["convert", str(tmp_path / "latin.sh")]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_yaml_is_printed_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    assert main(["convert", str(tmp_path / "theirs.yaml"), "lora.rank=4"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["lora"]["rank"] == 4
    assert "sequence_len" in printed.err


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


@pytest.mark.parametrize("name", ["lora_r", "sequence_len", "report_to", "val_size", "evals_per_epoch", "run_name"])
def test_errors_know_the_names_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The suggestion is the setting that the translation uses."""
    from flatout.config.names import FOREIGN_NAMES

    (tmp_path / "run.yaml").write_text(f"model: m\n{name}: 1\n")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    assert f"{name}: unknown key; did you mean {FOREIGN_NAMES[name]}?" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", every(4, [".py", ".jsonl", ".json", ".sh"]))
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
