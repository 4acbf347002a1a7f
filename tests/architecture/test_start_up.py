"""Importing does nothing and the command line answers at once."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "pydantic", "datasets", "peft")


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sorted(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_flatout_loads_nothing_heavy() -> None:
    assert modules_after("import flatout") == set()


def test_help_loads_nothing_heavy() -> None:
    assert modules_after("from flatout.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass") == set()


def test_a_wrong_config_is_told_before_torch_is_imported() -> None:
    code = (
        "import pathlib, tempfile\n"
        "from flatout.cli.main import main\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'run.yaml'\n"
        "path.write_text('model: {name: x}\\nlora: {rnak: 8}\\n')\n"
        "assert main(['train', str(path)]) == 2\nprint()"
    )
    assert modules_after(code) <= {"pydantic", "numpy"}
