"""What the files of rows and tokenizer tell is refused before torch is imported."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data.build import refuse_early
from flatout.data.rows import read
from flatout.errors import DataError

CODE = """
import json, sys
from flatout.cli.main import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print(codes, "torch" in sys.modules)
"""


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A working folder with rows and a model `bare` whose tokenizer has no chat template."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.model_dir, "bare")
    Path("bare/chat_template.jinja").unlink(missing_ok=True)
    config = json.loads(Path("bare/tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    Path("bare/tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(tiny.chats, "chats.jsonl")
    Path("odd.jsonl").write_text('{"weight": 3, "height": 5}\n')
    Path("empty.jsonl").write_text("")
    Path("text.jsonl").write_text('{"text": "One line."}\n' * 20)
    return tmp_path


def test_what_files_tell_is_refused_before_torch_is_imported(folder, tiny):
    refused = [
        ("chats.jsonl", "bare", "tokenizer 'bare' has no chat template"),
        ("odd.jsonl", str(tiny.model_dir), "odd.jsonl:1"),
        ("missing.jsonl", str(tiny.model_dir), "missing.jsonl: no such file or folder"),
    ]
    words = [
        [verb, f"model={model}", f"data={data}", "device=cpu"]
        for data, model, _ in refused
        for verb in ("plan", "train")
    ]
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(words)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[3] * 6} False"
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for (_, _, message), line in zip((one for one in refused for _ in range(2)), lines, strict=True):
        assert message in line


@pytest.mark.parametrize("change", ["data.template=chatml", "data.sources=[{path: text.jsonl}]"])
def test_a_template_or_rows_that_need_none_are_taken(folder, change):
    assert main(["plan", "model=bare", "data=chats.jsonl", "device=cpu", change]) == 0


def test_a_list_is_parsed_once(folder, monkeypatch):
    chats = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
    parsed, parse = list[str](), read.parse_json
    monkeypatch.setattr(read, "parse_json", lambda text: parsed.append(text) or parse(text))
    for row in chats[0], {"text": "One line."}:
        Path("rows.json").write_text(json.dumps([row] * 3))
        parsed.clear()
        refuse_early(DataConfig(name="set", root=folder, sources=[{"path": "rows.json"}], template="chatml"), "bare")
        assert len(parsed) == 1
        parsed.clear()
        without = DataConfig(name="set", root=folder, sources=[{"path": "rows.json"}])
        with pytest.raises(DataError, match="no chat template") if "text" not in row else nullcontext():
            refuse_early(without, "bare")
        assert len(parsed) == 1
