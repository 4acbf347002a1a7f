"""The first ten minutes in Python: data in memory, training, curves, a chat, and out to plain transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hub_stand_in import TOKEN, hub_stand_in

NOTEBOOK = """
import io, json, sys
from pathlib import Path

import datasets
import flatout

rows = [json.loads(line) for line in Path(CHATS).read_text().splitlines()]
# in two processes, which must not run this script again
built = flatout.build_data([*rows] * (600 // len(rows)), tokenizer="someone/tiny", name="all", num_procs=2)
assert built.num_samples > 256
run = flatout.train(model="someone/tiny", data=datasets.Dataset.from_list(rows), device="cpu", rank=4, lr=1e-3,
                    max_steps=4, samples_per_step=6, max_tokens=500,
                    eval={"fraction": 0.1, "every_steps": 2, "prompts": []})
assert "<iframe" in run.plot()._repr_html_()
sys.stdin = io.StringIO("Hello\\nAnd then?\\n")  # typed at the keyboard, until it ends
run.chat(max_new_tokens=4, temperature=0)
run.merge("merged")
print(run.push_to_hub("my-adapter"))
print(run.push_to_hub("my-model", merged=True, private=True))
exported = run.export("gguf", "gguf", kind="q8_0")
assert exported.path.is_file(), exported
print(exported.command)
"""

PLAIN = """
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

assert not any(name.startswith("flatout") for name in __import__("sys").modules)
model = AutoModelForCausalLM.from_pretrained("someone/my-model")
tokenizer = AutoTokenizer.from_pretrained("someone/my-model")
base = AutoModelForCausalLM.from_pretrained("someone/tiny")
adapted = PeftModel.from_pretrained(base, "someone/my-adapter")
local = AutoModelForCausalLM.from_pretrained("merged")
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with torch.no_grad():
    logits, by_adapter, by_files = (one(**inputs).logits for one in (model, adapted, local))
assert torch.equal(logits, by_files)
assert torch.allclose(logits, by_adapter, atol=1e-5)
with adapted.disable_adapter(), torch.no_grad():
    assert not torch.allclose(logits, adapted(**inputs).logits, atol=1e-5)
"""


def test_from_a_data_set_in_memory_to_plain_transformers(tiny: Any, tmp_path: Path) -> None:
    with hub_stand_in() as hub:
        hub.add("someone/tiny", tiny.model_dir)

        def run(code: str) -> str:
            script = tmp_path / "script.py"
            script.write_text(f"CHATS = {str(tiny.chats)!r}\n{code}")
            command = [sys.executable, str(script)]
            env = hub.env(tmp_path / "home")
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
            assert TOKEN not in done.stdout + done.stderr
            return done.stdout

        said = run(NOTEBOOK)
        # two answers were asked for, and the end of the input ended the chat
        assert said.count("> ") >= 3
        assert f"{hub.address}/someone/my-adapter" in said
        assert "llama-cli -m gguf/run-q8_0.gguf" in said
        run(PLAIN)
        assert hub.repos["someone/my-model"].private
        config = json.loads(hub.repos["someone/my-adapter"].files["adapter_config.json"])
        assert config["base_model_name_or_path"] == "someone/tiny"
        assert TOKEN not in "".join(path.read_text(errors="replace") for path in tmp_path.glob("runs/run/**/*.*"))
