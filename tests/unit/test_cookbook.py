"""Every recipe of the cookbook trains as it stands, on its own rows, and the loss is on what the page says."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flatout.cli.main import main
from flatout.config.read import load_config
from flatout.data.token_store import TokenStore
from flatout.demo.write import write_demo
from tests.usual import usual

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cookbook"
# what the first row teaches
TAUGHT = {
    "classify": "billing",
    "labels": "<|im_end|>",
    "extract": '{"number": "1041", "seller": "Weber Tools", "date": "2025-03-12", "total": 1180.0, "currency": "EUR"}',
    "tool_calls": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "day": "tomorrow"}}',
    "domain_text": " relief valve opens at 6.2 bar. Close valve B before you open valve A, or the pump runs dry.",
    "reasoning": "From 9:40 to 13:00 are 3 hours and 20 minutes. 5 more minutes make 3 hours and 25 minutes.\n</think>"
    "\n\n3 hours and 25 minutes",
    "style": "Heads-up: the site is off tonight from 10 to 11. We're moving to faster servers. Your data stays put.",
    "preference": "Only if they are faulty. Unworn shoes can come back within 30 days.",
}
# and what it must not
NOT_TAUGHT = {
    "classify": "charged twice",
    "preference": "return shoes",
    "tool_calls": "snow, -3 C<",
    "reasoning": "A train leaves",
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, 1, num_train=200, num_held_out=1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    return folder / "model"


def test_every_recipe_is_tested_and_shown_whole():
    page = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(TAUGHT)
    for path in FOLDER.glob("*.yaml"):
        settings = "".join(line for line in path.open(encoding="utf-8") if not line.startswith("#"))
        assert f"```yaml\n{settings}```" in page, path.name
        assert f"`examples/cookbook/{path.name}`" in page, path.name


@pytest.mark.parametrize("name", usual(TAUGHT, ["classify", "labels", "preference"]))
def test_a_recipe_trains_and_teaches_what_it_says(name, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = [f"model.name={tiny_model}", "device=cpu", "data.num_procs=1", "eval.max_new_tokens=2"]
    steps = ["batch.max_steps=1", f"data.root={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert main(["train", f"examples/cookbook/{name}.yaml", *small, *steps]) == 0
    config = load_config(tmp_path / "run" / "config.yaml")
    store = TokenStore.open(tmp_path / "data" / "built_dataset" / config.data.name)
    sample = store.sample(0)
    decode = AutoTokenizer.from_pretrained(tiny_model).decode
    taught = decode(sample.token_ids[sample.loss_mask])
    assert TAUGHT[name] in taught
    assert NOT_TAUGHT.get(name, "\0") not in taught
    assert store.num_samples == store.meta.counts["rows"] * (2 if name == "preference" else 1)
    if name == "labels":
        assert main(["eval", str(tmp_path / "run"), "--rows", "examples/cookbook/data/tickets.csv"]) == 0
        assert "macro_f1" in (tmp_path / "run/eval/tickets.json").read_text()
    if name == "classify":
        test = "examples/cookbook/data/tickets-test.jsonl"
        out = tmp_path / "eval.json"
        assert main(["eval", str(tmp_path / "run"), "--answers", test, "--out", str(out), "--max-new-tokens", "2"]) == 0
        assert json.loads(out.read_text())["num_prompts"] == 4
