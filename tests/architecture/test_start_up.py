"""Importing does nothing and the command line answers at once."""

import subprocess
import sys

from flatout.cli.main import main

HEAVY = ("torch", "transformers", "numpy", "pydantic", "datasets", "peft")
# what transformers and others would import, and a LoRA run on tokens that are built does not need
UNNEEDED = ("datasets", "pandas", "pyarrow", "scipy", "sklearn", "tensorflow", "torchao", "torchaudio", "torchvision")


def modules_after(code: str, names: tuple[str, ...] = HEAVY) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sorted(m for m in {names!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_flatout_loads_nothing_heavy():
    assert modules_after("import flatout") == set()


def test_help_loads_nothing_heavy():
    assert modules_after("from flatout.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass") == set()


def test_a_wrong_config_is_told_before_torch_is_imported():
    code = (
        "import pathlib, tempfile\n"
        "from flatout.cli.main import main\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'run.yaml'\n"
        "path.write_text('model: {name: x}\\nlora: {rnak: 8}\\n')\n"
        "assert main(['train', str(path)]) == 2\nprint()"
    )
    assert modules_after(code) <= {"pydantic", "numpy"}


def test_a_data_set_that_is_built_is_reused_without_torch(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("FLATOUT_CHECK_AGAIN")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["data", "build", str(tiny.chats), "--name", "d", "--tokenizer", str(tiny.model_dir)]
    words += ["--root", str(tmp_path), "--num-procs", "1"]
    assert main(words) == 0
    code = f"from flatout.cli.main import main\nassert main({words!r}) == 0\nprint()"
    assert modules_after(code) <= {"pydantic", "numpy"}
