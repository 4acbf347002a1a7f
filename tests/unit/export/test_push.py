"""What is pushed can be loaded by plain transformers and PEFT; nothing is overwritten, and no token is shown."""

import json
import shutil
import time

import pytest
import torch
import yaml
from hub_stand_in import READ_TOKEN, TOKEN, Repo, hub_of_this_process
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from flatout.cli.main import main
from flatout.export import push
from tests.usual import usual


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process uses, with a valid token."""
    with hub_of_this_process(tmp_path, monkeypatch) as running:
        yield running


def test_adapter_and_merged_model_load_from_the_hub(
    tiny, run_dir, hub, tmp_path, capsys,
    caplog,
):  # fmt: skip
    (run_dir / "eval").mkdir(exist_ok=True)
    row = {"task": "arc_easy", "metric": "acc", "value": 0.25, "stderr": None, "num_samples": 8}
    (run_dir / "eval" / "arc_easy.json").write_text(json.dumps({"tasks": [row]}))
    # as a person may leave them there
    for name, text in {"cut": "{", "list": "[1]", "rows": '{"tasks": [{"task": 1}]}'}.items():
        (run_dir / "eval" / f"{name}.json").write_text(text)
    hub.add("someone/base", tiny.model_dir)
    assert main(["push", str(run_dir), "adapter", "--base", "someone/base"]) == 0
    assert main(["push", str(run_dir), "someone/merged", "--merged", "--private"]) == 0
    captured = capsys.readouterr()
    assert f"{hub.address}/someone/adapter" in captured.out
    assert TOKEN not in captured.out + captured.err
    for name in ("cut", "list", "rows"):
        assert f"eval/{name}.json is no result of `flatout eval`" in caplog.text
    adapter, merged = hub.repos["someone/adapter"], hub.repos["someone/merged"]
    assert (adapter.private, merged.private) == (False, True)
    assert set(adapter.files) == {
        "README.md", "loss.svg", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads(adapter.files["adapter_config.json"])["base_model_name_or_path"] == "someone/base"
    assert not (run_dir / ".push.tmp").exists()
    for repo in (adapter, merged):
        # one commit, and no folder of this machine in it
        assert len(repo.commits) == 2
        assert not any(str(tiny.root.parent).encode() in data for data in repo.files.values())
    options = {"cache_dir": tmp_path / "cache"}
    base = AutoModelForCausalLM.from_pretrained("someone/base", **options)
    tokenizer = AutoTokenizer.from_pretrained("someone/adapter", **options)
    ids = torch.tensor([tokenizer("What color is it?")["input_ids"]])
    with torch.no_grad():
        by_adapter = PeftModel.from_pretrained(base, "someone/adapter", **options)(ids).logits
        by_merged = AutoModelForCausalLM.from_pretrained("someone/merged", **options)(ids).logits
    assert torch.allclose(by_adapter, by_merged, atol=1e-5)
    card = adapter.files["README.md"].decode()
    facts = yaml.safe_load(card.split("---")[1])
    assert facts["base_model"] == "someone/base"
    assert facts["library_name"] == "peft"
    for expected in ("## Load", "## Results", "loss.svg", "## Data", "chats.jsonl", "## Plan", "| lora.rank | 4 |",
                     "| arc_easy | acc | 0.2500 |", "## Versions", "transformers"):  # fmt: skip
        assert expected in card
    # the end of an answer, for programs that serve the base model with this adapter
    assert "serve someone/base" in card
    assert "--tokenizer FOLDER --generation-config FOLDER" in card
    loads = next(part for part in card.split("```python\n")[1:]).partition("```")[0]
    assert 'GenerationConfig.from_pretrained("someone/adapter")' in loads
    compile(loads, "card", "exec")
    assert "GenerationConfig" not in merged.files["README.md"].decode()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for repo in (adapter, merged):
        assert json.loads(repo.files["generation_config.json"])["eos_token_id"] == stop
    curve = adapter.files["loss.svg"].decode()
    assert curve.count("<polyline") == 2
    assert curve.count("<circle") == 4


def test_a_repository_is_replaced_only_when_asked(run_dir, hub, capsys):
    hub.repos["someone/full"] = Repo(commits=[{"model.safetensors": b"old", "README.md": b"old"}])
    hub.repos["someone/empty"] = Repo()
    command = ["push", str(run_dir), "someone/full", "--base", "someone/base"]
    assert main(command) == 2
    assert "someone/full exists and has 2 files" in capsys.readouterr().err
    assert len(hub.repos["someone/full"].commits) == 1
    assert main([*command, "--replace", "--private"]) == 2
    assert "someone/full exists and is public" in capsys.readouterr().err
    assert main([*command, "--replace"]) == 0
    assert "model.safetensors" not in hub.repos["someone/full"].files
    assert hub.repos["someone/full"].files["README.md"].startswith(b"---")
    assert main(["push", str(run_dir), "someone/empty", "--base", "someone/base"]) == 0
    assert "adapter_model.safetensors" in hub.repos["someone/empty"].files


FAILURES: list[tuple[str, str | None, dict[str, int], int, str]] = [
    ("mine", None, {}, 2, "set HF_TOKEN"),
    ("mine", "hf_wrong_token_of_a_user", {}, 2, "set HF_TOKEN to a valid one"),
    ("mine", TOKEN, {"/api/whoami": 503}, 6, "answers with an error (503)"),
    ("not a name", TOKEN, {}, 2, "'not a name' was not pushed: it is not a hub id"),
    ("mine", TOKEN, {"gone": 0}, 6, "does not answer within"),
    ("mine", TOKEN, {"/commit/": 412}, 2, "'someone/mine' was not pushed: the hub rejects it (412)"),
    ("mine", READ_TOKEN, {}, 2, "(403)"),
    ("other-org/mine", TOKEN, {}, 2, "(403)"),
    ("a/b/c", TOKEN, {}, 2, "is not a hub id"),
    ("mine", TOKEN, {"/lfs/": 403}, 2, "(403)"),
]


@pytest.mark.parametrize(("repo", "token", "fails", "code", "said"), usual(FAILURES, FAILURES[:7]))
def test_failures_are_one_sentence_without_the_token(
    run_dir, hub, repo, token, fails, code, said,
    monkeypatch, capsys,
):  # fmt: skip
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    if "gone" in fails:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    hub.fails = fails
    assert main(["push", str(run_dir), repo, "--base", "someone/base"]) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert said in error
    assert token is None or token not in error
    assert not any(len(found.commits) > 1 for found in hub.repos.values())


PATHS = ["/api/whoami", "/api/models/someone/mine", "/preupload", "/commit/", "/repos/create"]
ODD = [b"<html>Log in to this hotel</html>", b"[1, 2]", b'{"url": "http://elsewhere"}']


@pytest.mark.parametrize("path", usual(PATHS, ["/api/whoami", "/commit/"]))
@pytest.mark.parametrize("content", usual(ODD, ODD[:1]))
def test_a_hub_that_answers_something_else_is_one_sentence(run_dir, hub, path, content, capsys):
    hub.odd = {path: content}
    assert main(["push", str(run_dir), "mine", "--base", "someone/base"]) == 6
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{hub.address} does not answer as a hub does" in error
    assert TOKEN not in error
    hub.odd = {}
    assert main(["push", str(run_dir), "mine", "--base", "someone/base", "--replace"]) == 0


SILENT = [("/api/whoami", 1.0, 600.0), ("/commit/", 15, 1.0), ("/repos/create", 1.0, 600.0)]


@pytest.mark.parametrize(("path", "asked_s", "committed_s"), usual(SILENT, SILENT[:2]))
def test_a_hub_that_goes_silent_is_told_and_bounded(
    run_dir, hub, path, asked_s, committed_s, capsys,
    monkeypatch,
):  # fmt: skip
    """A question is waited for shortly, and a commit as long as a hub needs for one."""
    assert push.ASKED_S < push.COMMITTED_S
    monkeypatch.setattr(push, "ASKED_S", asked_s)
    monkeypatch.setattr(push, "COMMITTED_S", committed_s)
    monkeypatch.setattr("flatout.track.console.SILENT_S", 0.2)
    hub.silent = path
    started_s = time.monotonic()
    assert main(["push", str(run_dir), "mine", "--base", "someone/base"]) == 6
    assert time.monotonic() - started_s < 30
    said = capsys.readouterr().err
    assert f"... {'asking the hub' if 'whoami' in path else 'uploading to the hub'}" in " ".join(said.split())
    assert f"{hub.address} does not answer within" in said.splitlines()[-1]


def test_what_is_wrong_with_the_run_is_said_before_the_hub_is_asked(run_dir, hub, tmp_path, capsys):
    assert main(["push", str(run_dir), "mine"]) == 2
    assert "others do not have" in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    # a base model that is only on another machine
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["name"] = "/nowhere/base"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["push", str(run), "mine"]) == 2
    assert "others do not have" in capsys.readouterr().err
    (run / "final" / "tokenizer.json").write_text("{}")
    assert main(["push", str(run), "mine", "--base", "someone/base"]) == 4
    assert "it was damaged or edited" in capsys.readouterr().err
    assert main(["push", "x" * 5000, "mine"]) == 2
    assert "File name too long" in capsys.readouterr().err
    shutil.rmtree(run / "final")
    assert main(["push", str(run), "mine"]) == 2
    assert "the run is not finished" in capsys.readouterr().err
    assert hub.calls == []
