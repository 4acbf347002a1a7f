"""No verb runs a file that it shows, plans, reads or translates: every verb with every kind of foreign file.

A foreign file leaves a canary when it is executed in any of the ways that other tools execute such files.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flatout.cli.main import main
from flatout.cli.parser import Number, Parser
from flatout.cli.verbs import all_verbs
from tests.usual import usual

# where foreign code says that it ran
CANARIES = "CANARIES"


class Sings:
    """What unpickling calls: it opens the canary for writing."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


def python_of(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()\n"


def sft(here: Path, canary: Path) -> Path:
    """A script that trains with TRL, and sets `config`."""
    return written(
        here / "sft.py", f"{python_of(canary)}from trl import SFTConfig\nconfig = SFTConfig('o', seed=f())\n"
    )


def notebook(here: Path, canary: Path) -> Path:
    source = [python_of(canary), f"!touch {canary}\n", "from trl import SFTTrainer\nSFTTrainer('m')\n"]
    cells = [{"cell_type": "code", "source": source, "metadata": {}, "outputs": []}]
    return written(here / "sft.ipynb", json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}))


def shell(here: Path, canary: Path) -> Path:
    return written(
        here / "run.sh", f"touch {canary}\ntrl sft --model_name_or_path $(touch {canary}) --seed `touch {canary}`\n"
    )


def makefile(here: Path, canary: Path) -> Path:
    return written(here / "Makefile", f"X := $(shell touch {canary})\nall:\n\ttouch {canary}\n")


def yaml_tag(here: Path, canary: Path) -> Path:
    return written(here / "evil.yaml", f"model: !!python/object/apply:os.system ['touch {canary}']\ndata: x\n")


def lm_eval_tag(here: Path, canary: Path) -> Path:
    written(here / "task" / "utils.py", python_of(canary))
    return written(
        here / "task" / "task.yaml", "task: evil\nbase_model: m\nprocess_docs: !function utils.docs\n"
    ).parent


def pickled(name: str) -> Callable[[Path, Path], Path]:
    def make(here: Path, canary: Path) -> Path:
        path = here / name
        path.write_bytes(pickle.dumps({"text": Sings(canary)}))
        return path

    return make


def torch_file(here: Path, canary: Path) -> Path:
    with zipfile.ZipFile(here / "model.pt", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Sings(canary)))
        file.writestr("archive/version", "3\n")
    return here / "model.pt"


def numpy_objects(here: Path, canary: Path) -> Path:
    np.save(here / "rows.npy", np.array([Sings(canary)], dtype=object), allow_pickle=True)
    return here / "rows.npy"


def parquet(here: Path, canary: Path) -> Path:
    """Rows whose column says that it is an extension type, pickled, as old pyarrow read them."""
    import pyarrow
    from pyarrow.parquet import write_table

    meta = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Sings(canary))}
    field = pyarrow.field("text", pyarrow.string(), metadata=meta)
    write_table(pyarrow.table([["a row", "another"]], schema=pyarrow.schema([field])), here / "rows.parquet")
    return here / "rows.parquet"


def web_shards(here: Path, canary: Path) -> Path:
    with tarfile.open(here / "shard.tar", "w") as shard:
        for name in ("0.pkl", "0.pyd", "0.pth"):
            content = pickle.dumps(Sings(canary))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return here / "shard.tar"


def loading_script(here: Path, canary: Path) -> Path:
    written(here / "rows" / "train.jsonl", '{"text": "a row"}\n' * 8)
    written(here / "rows" / "__init__.py", python_of(canary))
    return written(here / "rows" / "rows.py", python_of(canary)).parent


def jinja(here: Path, canary: Path) -> Path:
    escapes = [
        "{{ cycler.__init__.__globals__.os.system('touch X') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set o = namespace.__init__.__globals__['__builtins__']['open']('X', 'w') %}",
        "{{ raise_exception.__globals__['__builtins__']['open']('X', 'w') }}",
        "{{ (strftime_now|attr('__globals__'))['__builtins__']['open']('X', 'w') }}",
    ]
    text = "".join(escapes).replace("X", str(canary))
    return written(here / "chat.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}" + text)


def model(here: Path, canary: Path, tiny: Path, *, weights: bool = False) -> Path:
    """A model folder with code of its own for every part, also under our names; with pickled weights alone."""
    folder = here / ("pickled_model" if weights else "model_with_code")
    shutil.copytree(tiny, folder)
    code = f"{python_of(canary)}class Evil:\n    pass\n"
    names = ("configuration", "modeling", "tokenization", "processing", "__init__", "flatout", "sitecustomize")
    for name in names:
        written(folder / f"{name}.py", code)
    written(folder / "custom_generate" / "generate.py", code)
    if weights:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Sings(canary)))
        return folder
    classes = {"AutoConfig": "configuration", "AutoModelForCausalLM": "modeling", "AutoModel": "modeling"}
    classes |= {"AutoTokenizer": "tokenization", "AutoProcessor": "processing"}
    auto_map = {name: f"{file}.Evil" for name, file in classes.items()}
    for file in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / file).read_text())
        content |= {"auto_map": auto_map | {"AutoTokenizer": ["tokenization.Evil", None]}, "trust_remote_code": True}
        (folder / file).write_text(json.dumps(content | {"model_type": "evil"} if file == "config.json" else content))
    return folder


def adapter(here: Path, canary: Path, tiny: Path) -> Path:
    content = {"peft_type": "LORA", "base_model_name_or_path": str(tiny), "r": 2, "lora_alpha": 4}
    content |= {"target_modules": ["q_proj"], "auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}}
    folder = written(here / "adapter" / "adapter_config.json", json.dumps(content)).parent
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Sings(canary)))
    written(folder / "evil.py", python_of(canary))
    return folder


def run_with_objective(here: Path, canary: Path, run: Path) -> Path:
    """A finished run that somebody sent: its settings name a loss of a file beside it."""
    folder = here / "their_run"
    shutil.copytree(run, folder)
    code = f"{python_of(canary)}from flatout import Objective\nclass Evil(Objective):\n    pass\n"
    own = written(folder / "evil.py", code)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings |= {"objective": {"path": f"{own}:Evil"}, "run_dir": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "checkpoints.pkl").write_bytes(pickle.dumps(Sings(canary)))
    return folder


def shell_name(here: Path, canary: Path) -> Path:
    """A name that a shell would run; slashes cannot be part of it."""
    canary_here = os.path.relpath(canary, here).replace("/", "$(printf '\\057')")
    return written(here / f"$(touch {canary_here}).yaml", "model: m\ndata: x\n")


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "script": sft,
    "notebook": notebook,
    "shell script": shell,
    "makefile": makefile,
    "YAML tag": yaml_tag,
    "task with a function": lm_eval_tag,
    "pickle": pickled("rows.pkl"),
    "joblib": pickled("rows.joblib"),
    "weights": pickled("pytorch_model.bin"),
    "pickle named jsonl": pickled("rows.jsonl"),
    "torch file": torch_file,
    "numpy objects": numpy_objects,
    "parquet": parquet,
    "webdataset": web_shards,
    "loading script": loading_script,
    "template": jinja,
    "name": shell_name,
}
OF_THE_WORLD = ("model with code", "pickled model", "adapter", "run with an objective")
# what a command takes in the place of an argument or option; a foreign file is tried in each of `FILES`
FILES = set(
    """path file paths template config run runs folder targets target name --data --model --tokenizer --template --root
    --base --image --tasks --answers --rows --measured --device-map --to --out --media-root --system""".split()  # noqa: SIM905
)
WORDS = set(
    """repo overrides --column --from --without --name --split --subset --revision --unread-files --format --key --pairs
    --template-arg --new-token --new-special-token --empty-reasoning --lost-reasoning
    --end-of-turn --special-tokens --loss-type --too-long --on-bad-row --dedupe --device --nnodes --rdzv --tmux
    --partition --account --time --image --claim --mount --runtime --accelerator --sort --tagged --note --tag --untag
    --compare --prompt --quantize""".split()  # noqa: SIM905
)
# they take no file: demo writes its own, and studio is a server with tests of its own
TAKE_NONE = ("demo", "studio")
# a person's own programs, as their help says: llama.cpp's, and files of tasks, which can run code
PROGRAMS = ("--llama-cpp", "--include-path")
SETTINGS = ("model", "data", "data.template", "data.tokenizer", "lora.continue_from", "deepspeed", "eval.data")
GOOD = {
    "file": "run.yaml", "config": "run.yaml", "run": "run", "runs": "run", "target": "run", "targets": "run",
    "paths": "chats.jsonl", "--tokenizer": "model", "template": "model", "name": "chats", "repo": "me/x",
    "--to": "gguf", "--name": "new", "path": "new.yaml", "folder": ".",
}  # fmt: skip
EXTRA = {"chat": ["--prompt", "Hi", "--max-new-tokens", "1"], "eval": ["--answers", "answers.jsonl"]}


def parsers() -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield the words and the parser of every verb and action, from the command line's own table."""
    for name, verb in all_verbs().items():
        parser = Parser(prog=f"flatout {name}")
        verb.arguments(parser)
        actions = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        if not actions:
            yield [name], parser
        for action in actions:
            yield from (([name, word], inner) for word, inner in action.choices.items())


def commands(foreign: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every command with the foreign file in one place, and good values in the others; and the place's name."""
    for number, (words, parser) in enumerate(parsers()):
        if words[0] in TAKE_NONE:
            continue
        taken = {(one.option_strings or [one.dest])[0]: one for one in parser._actions if one.nargs != 0}
        needed = [name for name, one in taken.items() if one.required and name != "overrides"]
        for name, one in taken.items():
            if one.type in (int, float) or isinstance(one.type, Number) or one.choices is not None or name in PROGRAMS:
                continue
            assert name in (*FILES, *WORDS), f"say in this test whether {name} of {words} takes a file"
            # --image is a picture for chat, and a container's for launch
            if name not in FILES or (words == ["launch"] and name == "--image"):
                continue
            values = {other: GOOD.get(other, f"out-{number}") for other in needed} | {name: foreign}
            plain = [value for other, value in values.items() if other[0] != "-"]
            options = [word for other, value in values.items() if other[0] == "-" for word in (other, value)]
            yield name, [*words, *plain, *options, *EXTRA.get(words[0], ())]
    for verb in ("plan", "doctor", "train"):
        for setting in SETTINGS:
            yield setting, [verb, "run.yaml", f"{setting}={foreign}", "run_dir=other", "batch.max_steps=1"]


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """A folder with a model, rows, settings, a built data set and a finished run."""
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(tiny.model_dir, root / "model")
    lines = tiny.chats.read_text().splitlines(keepends=True)
    written(root / "chats.jsonl", "".join(lines[:8]))
    written(root / "answers.jsonl", '{"question": "one?", "answer": "two"}\n')
    settings = {"run_dir": "run", "device": "cpu", "model": "model", "data": "chats.jsonl", "lora": {"rank": 2}}
    settings |= {"batch": {"samples_per_step": 2, "max_steps": 1}, "eval": {"prompts": []}}
    written(root / "run.yaml", yaml.safe_dump(settings))
    here = Path.cwd()
    os.chdir(root)
    try:
        assert main(["train", "run.yaml"]) == 0
    finally:
        os.chdir(here)
    return root


def made(kind: str, here: Path, canary: Path, world: Path) -> Path:
    if kind == "adapter":
        return adapter(here, canary, world / "model")
    if kind == "run with an objective":
        return run_with_objective(here, canary, world / "run")
    if kind in OF_THE_WORLD:
        return model(here, canary, world / "model", weights=kind == "pickled model")
    return KINDS[kind](here, canary)


# kinds that run by default, with the places that such a file is for; of the other places, a fifth, another for each
ROWS, CONFIGS = {"paths", "data", "--data", "--answers", "--rows", "eval.data"}, {"config", "file", "path", "deepspeed"}
MODELS = {"model", "--model", "--base", "--tokenizer", "data.tokenizer", "lora.continue_from", "run", "target"}
HOME = {
    "script": CONFIGS, "YAML tag": CONFIGS, "pickle named jsonl": ROWS, "parquet": ROWS,
    "template": {"template", "--template", "data.template"}, **dict.fromkeys(OF_THE_WORLD, MODELS),
}  # fmt: skip
CASES = [*((kind, 5) for kind in HOME), *((kind, 1) for kind in (*KINDS, *OF_THE_WORLD))]


@pytest.mark.parametrize(("kind", "share"), usual(CASES, CASES[: len(HOME)]))
def test_no_verb_runs_a_foreign_file(world, tmp_path, monkeypatch, capfd, kind, share):
    here = tmp_path / "here"
    shutil.copytree(world, here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    canary = tmp_path / CANARIES
    foreign = made(kind, here, canary, world)
    ran = []
    for number, (name, words) in enumerate(commands(foreign.name), CASES.index((kind, share))):
        if number % share and name not in HOME[kind]:
            continue
        code = main(words)
        capfd.readouterr()
        if canary.exists():
            ran.append(" ".join(words))
            canary.unlink()
        assert code in range(9), words
    # a loss of one's own is read where the settings that name it are used: see test_what_is_asked_for_runs
    documented = [line for line in ran if kind == "run with an objective" and line.startswith(("train ", "plan "))]
    assert [line for line in ran if line not in documented] == []


def test_canaries_sing_when_their_file_is_executed(tmp_path, world):
    """What other tools do with such files: an interpreter, a shell, pickle, YAML's unsafe loader, a plain template."""
    import jinja2

    canary = tmp_path / CANARIES

    def sings(run: Callable[[], Any]) -> bool:
        with suppress(Exception):  # after the canary has sung, the file may fail
            run()
        sang = canary.exists()
        canary.unlink(missing_ok=True)
        return sang

    def in_shell(*words: str) -> Any:
        return subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)

    def of_parquet() -> Any:
        import pyarrow.parquet

        field = pyarrow.parquet.read_schema(KINDS["parquet"](tmp_path, canary)).field("text")
        return pickle.loads(field.metadata[b"ARROW:extension:metadata"])

    def of_torch(file: Path) -> Any:
        import torch

        return torch.load(file, weights_only=False)

    def in_python(file: Path) -> Any:
        return exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})

    def of_tar(file: Path) -> Any:
        with tarfile.open(file) as shard:
            return pickle.load(shard.extractfile("0.pkl") or io.BytesIO())

    make = {kind: lambda kind=kind: made(kind, tmp_path, canary, world) for kind in (*KINDS, *OF_THE_WORLD)}
    ways: dict[str, Callable[[], Any]] = {
        "script": lambda: in_python(make["script"]()),
        "notebook": lambda: exec(json.loads(make["notebook"]().read_text())["cells"][0]["source"][0], {}),
        "shell script": lambda: in_shell("bash", str(make["shell script"]())),
        "YAML tag": lambda: yaml.unsafe_load(make["YAML tag"]().read_text()),
        "task with a function": lambda: in_python(make["task with a function"]() / "utils.py"),
        "torch file": lambda: of_torch(make["torch file"]()),
        "numpy objects": lambda: np.load(make["numpy objects"](), allow_pickle=True),
        "parquet": of_parquet,
        "webdataset": lambda: of_tar(make["webdataset"]()),
        "loading script": lambda: in_python(make["loading script"]() / "rows.py"),
        "template": lambda: jinja2.Template(make["template"]().read_text().split("{{ ''")[0]).render(messages=[]),
        "name": lambda: in_shell("bash", "-c", f"cat {make['name']().name}"),
        "model with code": lambda: in_python(make["model with code"]() / "modeling.py"),
        "pickled model": lambda: of_torch(make["pickled model"]() / "pytorch_model.bin"),
        "adapter": lambda: of_torch(make["adapter"]() / "adapter_model.bin"),
        "run with an objective": lambda: in_python(make["run with an objective"]() / "evil.py"),
    }
    for kind in ("pickle", "joblib", "weights", "pickle named jsonl"):
        ways[kind] = lambda kind=kind: pickle.loads(make[kind]().read_bytes())
    if shutil.which("make"):
        ways["makefile"] = lambda: in_shell("make", "-f", str(make["makefile"]()))
    assert [kind for kind, run in ways.items() if not sings(run)] == []
    assert {*KINDS, *OF_THE_WORLD} - ways.keys() <= {"makefile"}


def test_what_is_asked_for_runs(world, tmp_path, monkeypatch, capfd):
    """A configuration in Python and a loss of one's own are code, by the verbs whose pages say so."""
    here, canary = tmp_path / "here", tmp_path / CANARIES
    shutil.copytree(world, here)
    monkeypatch.chdir(here)
    load = "from flatout.config.read import load_config\nfrom pathlib import Path\n"
    written(here / "own.py", f"{python_of(canary)}{load}config = load_config(Path('run.yaml'))\n")
    code = "from flatout import Objective\nclass Own(Objective):\n    def __call__(self, tokens):\n"
    written(here / "loss.py", f"{python_of(canary)}{code}        return {{'loss': -tokens.logprobs.sum()}}\n")
    for words in (["plan", "own.py"], ["doctor", "own.py"], ["train", "own.py"]):
        assert main(words) == 0, words
        assert canary.exists(), words
        canary.unlink()
    ways = [["plan", "run.yaml"], ["verify", "run.yaml", "--ranks=1"], ["train", "run.yaml", "run_dir=new"]]
    for words in ways:
        # what is loaded once is kept, by the content of the file
        (here / "loss.py").write_text((here / "loss.py").read_text() + "#\n")
        canary.unlink(missing_ok=True)
        assert main([*words, "objective.path=loss.py:Own"]) == 0, words
        assert canary.exists(), words
    for words in (["convert", "own.py"], ["data", "build", "own.py", "--tokenizer", "model", "--name", "x"]):
        canary.unlink(missing_ok=True)
        assert main(words) != 0, words
        assert not canary.exists(), words


def test_modules_of_the_working_folder_are_not_imported(world, tmp_path):
    """`python -m flatout` and the processes that it starts, in a folder with modules of our libraries' names."""
    here, canary = tmp_path / "here", tmp_path / CANARIES
    shutil.copytree(world, here)
    for name in ("yaml", "torch", "numpy", "json", "pydantic", "transformers", "gguf", "conftest", "sitecustomize"):
        written(here / f"{name}.py", python_of(canary))
    written(here / "flatout_migrate" / "__init__.py", python_of(canary))
    written(here / ".env", f"X=$(touch {canary})\n")
    rows = (here / "chats.jsonl").read_text()
    written(here / "many.jsonl", rows * 80)  # more than a process takes at once
    flatout = Path(sys.executable).with_name("flatout")
    build = ["data", "build", "many.jsonl", "--tokenizer", "model", "--name", "many", "--num-procs", "2"]
    for command in ([sys.executable, "-m", "flatout", *build], [str(flatout), "report", "run", "--format", "md"]):
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not canary.exists(), command
    # plain Python imports them
    subprocess.run([sys.executable, "-c", "import yaml"], cwd=here, check=True)
    assert canary.exists()
