"""A chat at the keyboard: commands, a system prompt, sampling, and several models beside each other."""

from __future__ import annotations

import io
import json
import re
import shutil
from typing import Any

import pytest
import torch

from flatout.cli.main import main

# a tiny model's likeliest token is the same everywhere; drawn ones differ, and are the same for the same seed
DRAWN = ("--temperature", "2", "--seed", "3")


@pytest.fixture(scope="module")
def run_dir(tiny, tmp_path_factory):
    from flatout.trainer.run import train

    config = tiny.config(tmp_path_factory.mktemp("chat") / "run", batch={"max_steps": 6}, optim={"lr": 0.2})
    return train(config).folder


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    """`flatout chat` with these lines typed, until the end of input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *words, "--device", "cpu", "--max-new-tokens", "12"])


def answers(out: str) -> list[str]:
    """What was printed after each question, without the prompt's sign."""
    return [part.strip() for part in re.split("^> ", out, flags=re.MULTILINE)[1:]]


def test_commands_and_the_end_of_input(run_dir, monkeypatch, capsys):
    typed = "What color?\nAnd now?\n/clear\nWhat color?\n/system Be kind.\n/help\n/hlep\n/etc/passwd is what?\n"
    assert chat(monkeypatch, typed, str(run_dir), *DRAWN) == 0
    first, second, cleared, again, system, helped, unknown, slash, end = answers(capsys.readouterr().out)
    assert first == again != second
    assert cleared == "The conversation was cleared. System prompt: none"
    assert system == "The conversation was cleared. System prompt: Be kind."
    assert "/clear" in helped
    assert "There is no command /hlep" in unknown
    assert "no command" not in slash
    assert end == ""
    assert chat(monkeypatch, "/exit\nWhat color?\n", str(run_dir)) == 0
    assert len(answers(capsys.readouterr().out)) == 1


def test_system_prompts_start_conversations(run_dir, monkeypatch):
    asked: list[list[str]] = []

    def answer(model: Any, tokenizer: Any, messages: Any, **_: Any) -> str:
        asked.append([f"{one['role'][0]}:{one['content']}" for one in messages])
        return "An answer."

    monkeypatch.setattr("flatout.rollout.chat.answer", answer)
    typed = "One?\nTwo?\n/clear\nThree?\n/system Be kind.\nFour?\n"
    assert chat(monkeypatch, typed, str(run_dir), "--system", "Be brief.") == 0
    brief = "s:Be brief."
    assert asked == [
        [brief, "u:One?"],
        [brief, "u:One?", "a:An answer.", "u:Two?"],
        [brief, "u:Three?"],
        ["s:Be kind.", "u:Four?"],
    ]


def test_models_answer_beside_each_other(run_dir, tiny, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    shutil.copytree(run_dir / "final", other)
    alone = {}
    for name in (str(run_dir), str(tiny.model_dir)):
        assert chat(monkeypatch, "What color?\nAnd now?\n", name, *DRAWN) == 0
        alone[name] = answers(capsys.readouterr().out)[:2]
    words = (str(run_dir), str(other), "--compare", "base", *DRAWN)
    assert chat(monkeypatch, "What color?\nAnd now?\n", *words) == 0
    captured = capsys.readouterr()
    assert captured.err.count("loading ") == 3
    for turn, text in enumerate(answers(captured.out)[:2]):
        parts = re.split(r"\[([^\]\n]*)\]\n", text)
        found = dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
        # each has its own conversation
        assert found[str(run_dir)] == found[str(other)] == alone[str(run_dir)][turn]
        assert found["base"] == alone[str(tiny.model_dir)][turn]
        assert found["base"] != found[str(run_dir)]


def test_adapters_of_one_base_share_its_weights(run_dir):
    from flatout.models.load.inference import load_trained, resolve_model_paths

    paths, cpu = resolve_model_paths(str(run_dir)), torch.device("cpu")
    first, _ = load_trained(paths, device=cpu)
    second, _ = load_trained(paths, device=cpu, sibling=(paths, first))
    layers = [one.model.layers[0].mlp.up_proj for one in (first, second)]
    assert layers[0].base.weight.data_ptr() == layers[1].base.weight.data_ptr()
    assert layers[0].lora_a.data_ptr() != layers[1].lora_a.data_ptr()
    assert first.get_input_embeddings().weight.data_ptr() == second.get_output_embeddings().weight.data_ptr()


def test_generation_config_decides_how_to_sample(tiny, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny.model_dir, folder)
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    for options, expected in (
        ((), "sampled: temperature 0.5, top_p 0.9, top_k 20"),
        (("--top-p", "0.3"), "sampled: temperature 0.5, top_p 0.3, top_k 20"),
        (("--temperature", "0"), "greedy"),
    ):
        assert chat(monkeypatch, "", str(folder), *options) == 0
        assert f"Answers are {expected}" in capsys.readouterr().err


def test_tokens_are_printed_one_by_one(run_dir, monkeypatch):
    written: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stdout", Recorder())
    words = ["chat", str(run_dir), "--prompt", "What color?", "--device", "cpu", "--temperature", "3", "--top-k", "200"]
    assert main([*words, "--max-new-tokens", "40"]) == 0
    assert sum(bool(text.strip()) for text in written) > 3


@pytest.mark.parametrize(("words", "said"), [((), "given twice"), (("--compare", "base"), "--compare base: ")])
def test_what_cannot_be_compared(tiny, words, said, monkeypatch, capsys):
    models = [str(tiny.model_dir)] * (1 if words else 2)
    assert chat(monkeypatch, "", *models, *words) == 2
    assert said in capsys.readouterr().err


def test_a_prompt_beyond_the_models_positions_is_told(run_dir, monkeypatch, capsys):
    length = 8_000
    assert main(["chat", str(run_dir), "--device", "cpu", "--prompt", "x y" * (length // 3)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: the prompt has [\d,]+ tokens, but the model has 2,048 positions .*; shorten it", error)
    # at the keyboard, the turn is taken back and the chat goes on
    assert chat(monkeypatch, f"{'x y' * (length // 3)}\nWhat color?\n", str(run_dir), *DRAWN) == 0
    told = capsys.readouterr()
    assert "but the model has 2,048 positions" in told.err
    assert chat(monkeypatch, "What color?\n", str(run_dir), *DRAWN) == 0
    assert answers(capsys.readouterr().out)[0] in told.out


def test_an_answer_ends_with_the_positions(run_dir, capsys):
    command = ["chat", str(run_dir), "--device", "cpu", "--prompt", "x y" * 650, "--max-new-tokens", "20000"]
    assert main([*command, *DRAWN]) == 0
    assert "2,048" not in capsys.readouterr().err


def test_a_long_silent_answer_tells_its_tokens(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("flatout.cli.chat.SILENT_S", 0.0)
    assert main(["chat", str(run_dir), "--device", "cpu", "--prompt", "Hi", "--max-new-tokens", "12", *DRAWN]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "of at most 12" in line]
    assert told
    assert re.fullmatch(r"\.\.\. answering, token \d+ of at most 12", told[0])
