"""Change something and run again: the error says the commands, each of them works, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml

import flatout
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import CheckpointError, UsageError
from flatout.io.file_lock import RunLock
from flatout.track.run_log import RunNotes, write_notes
from tests.usual import usual


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A folder with run.yaml and runs/run, two steps, evaluated and finished."""
    root = tmp_path_factory.mktemp("again")
    config = tiny.config(root, batch={"max_steps": 2}, eval={"fraction": 0.1, "prompts": []})
    (root / "run.yaml").write_text(dump_config(config.model_copy(update={"run_dir": None})))
    with chdir(root):
        assert main(["train", "run.yaml"]) == 0
    return root


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """A copy of it, as the working folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ways_out(said: str) -> list[list[str]]:
    """The words that an error says to try."""
    lines = [line.removeprefix("  try ") for line in said.splitlines() if line.startswith("  try ")]
    return [shlex.split(line, comments=True) for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


THREADED = """
import threading, torch
from flatout.objectives.cross_entropy import CrossEntropy

def work():
    while True:
        torch.zeros(100_000).sum()

class Own(CrossEntropy):
    def __call__(self, tokens):
        threading.Thread(target=work, daemon=True).start()
        return super().__call__(tokens)
"""


def test_a_thread_inside_torch_does_not_turn_a_finished_run_into_a_crash(here):
    (here / "own.py").write_text(THREADED)
    words = ["train", "run.yaml", "name=threads", "objective.path=own.py:Own", "batch.max_steps=1", "eval.fraction=0"]
    command = [sys.executable, "-m", "flatout", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "final" in run.stdout


def test_other_settings_end_in_two_commands_that_work(here, capsys):
    before = contents(here / "runs" / "run")
    assert main(["train", "run.yaml", "optim.lr=1e-4"]) == 4
    new, restart, _ = ways_out(capsys.readouterr().err)
    assert (new, restart) == (["name=run-2"], ["--restart"])
    assert main(["train", "run.yaml", "optim.lr=1e-4", *new]) == 0
    assert (here / "runs" / "run-2" / "final").is_dir()
    capsys.readouterr()
    assert main(["train", "run.yaml", "optim.lr=1e-4", *restart]) == 0
    assert "restart    the earlier run is now runs/run.old-1\n" in capsys.readouterr().out
    left = contents(here / "runs" / "run.old-1")
    # the refused start wrote its own lines
    assert all(
        left[name] == text for name, text in before.items() if name not in (".lock", "train.log", "events.jsonl")
    )
    assert left["events.jsonl"].startswith(before["events.jsonl"])
    assert flatout.load("run").config.optim.lr == 1e-4
    assert main(["train", "run.yaml", "optim.lr=1e-4"]) == 0  # complete, and not started over
    assert "already complete" in capsys.readouterr().out


def test_a_restart_of_nothing_starts_and_of_a_held_folder_is_refused(here, capsys):
    assert main(["train", "run.yaml", "name=new", "--restart"]) == 0
    assert not (here / "runs" / "new.old-1").exists()
    with RunLock(here / "runs" / "run"):
        assert main(["train", "run.yaml", "--restart"]) == 6
    assert "is locked by" in capsys.readouterr().err
    assert not (here / "runs" / "run.old-1").exists()


def test_a_restart_takes_nothing_out_of_the_run_it_moves(here, capsys):
    before = contents(here / "runs" / "run")
    for words in (["lora.continue_from=runs/run/final"], ["model.name=runs/run/final"]):
        assert main(["train", "run.yaml", *words, "--restart"]) == 2
        assert "--restart would move runs/run/final away, which the new run reads" in capsys.readouterr().err
    assert contents(here / "runs" / "run") == before
    shutil.copytree(here / "runs" / "run" / "final", here / "first")
    assert main(["train", "run.yaml", "lora.continue_from=first", "--restart"]) == 0
    assert (here / "runs" / "run.old-1" / "final").is_dir()


OWN = "from flatout.objectives.cross_entropy import CrossEntropy\n\nclass Mine(CrossEntropy):\n    pass\n"
# a setting that names a path -> what is there; those that go together are one run's
READ = {
    "objective.path={}:Mine": "own.py",
    "objective.path=link.py:Mine": "own.py",
    "data.sources=[] data.name=chats data.root={}": "data",
    "eval={{data: chats}} data.name=new data.root={}": "data",
    "data.tokenizer={} data.name=new": "tokenizer",
    "data.template={} data.name=new": "chat.jinja",
    "data.media_root={} data.name=new": "media",
    "eval.prompts={}": "prompts.txt",
    "data.sources=[{{path: {}}}] data.name=new": "more.jsonl",
    "data.sources=[{{path: runs/**/more.json*}}] data.name=new": "more.jsonl",
}
TOGETHER = (
    "objective.path=own.py:Mine data.tokenizer=inputs/tokenizer data.template=inputs/chat.jinja data.name=new "
    "data.media_root=inputs/media eval.prompts=inputs/prompts.txt data.sources=[{{path: inputs/more.jsonl}}]"
)


def test_a_restart_moves_no_path_away_that_the_settings_name(tiny, here, capsys):
    config, inside, outside = flatout.load("run").config, here / "runs" / "run" / "inputs", here / "inputs"
    (outside / "media").mkdir(parents=True)
    (outside / "own.py").write_text(OWN)
    (here / "own.py").symlink_to(outside / "own.py")
    (outside / "chat.jinja").write_text("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}")
    (outside / "prompts.txt").write_text("hello\n")
    shutil.copy(config.data.sources[0].path, outside / "more.jsonl")
    shutil.copytree(config.data.root, outside / "data")
    shutil.copytree(tiny.model_dir, outside / "tokenizer")
    shutil.copytree(outside, inside)
    (here / "link.py").symlink_to(inside / "own.py")
    before = contents(here / "runs" / "run")
    for words, file in READ.items():
        assert main(["train", "run.yaml", *_words(words, f"runs/run/inputs/{file}"), "--restart"]) == 2, words
        assert re.search(r"--restart would move \S+ away, which the new run reads", capsys.readouterr().err), words
        assert contents(here / "runs" / "run") == before, words
    shutil.rmtree(inside)
    assert main(["train", "run.yaml", *_words("data.sources=[{{path: gone.jsonl}}] data.name=new"), "--restart"]) == 3
    assert not (here / "runs" / "run.old-1").exists()
    # outside, the same are read
    for number, words in enumerate((TOGETHER, "data.sources=[] data.name=chats data.root=inputs/data"), 1):
        assert main(["train", "run.yaml", *_words(words), "--restart"]) == 0, words
        assert (here / "runs" / f"run.old-{number}").exists()


def _words(words: str, path: str = "") -> list[str]:
    """Overrides with a path, one for each setting at the top."""
    return re.split(r" (?=[a-z_.]+=)", words.format(path))


NAMED = ["the file of settings", "an override", "a .py file", "a .py file's own code"]


@pytest.mark.parametrize("named", usual(NAMED, [NAMED[0], NAMED[3]]))
def test_a_restart_keeps_the_files_of_settings_where_they_are(here, capsys, named):
    folder, overrides = here / "runs" / "run", ["strategy=deepspeed"]  # which one process needs no package for
    values, file = yaml.safe_load((here / "run.yaml").read_text()), "again.yaml"
    if ".py" in named:
        file, code = "again.py", "json.load(open('runs/run/stages/ds.json'))"
        given = "'runs/run/stages/ds.json'" if named == "a .py file" else code
        (folder / file).write_text(
            "import json\nimport yaml\nfrom flatout.config.read import make_config\n"
            f"values = yaml.safe_load(open('run.yaml')) | {{'strategy': 'deepspeed', 'deepspeed': {given}}}\n"
            "config = make_config(values)\n"
        )
    elif named == "an override":
        overrides += ["deepspeed=runs/run/stages/ds.json"]
    else:
        values |= {"deepspeed": "stages/ds.json"}
    (folder / "stages").mkdir()
    (folder / "stages" / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    if ".py" not in named:
        (folder / file).write_text(yaml.safe_dump(values))
    before = {name: text for name, text in contents(folder).items() if name in (file, "stages/ds.json")}
    command = ["train", f"runs/run/{file}", *overrides]
    assert main([*command, "--restart"]) == 0
    assert (here / "runs" / "run.old-1" / "final").is_dir()
    assert {name: contents(folder).get(name) for name in before} == before
    capsys.readouterr()
    assert main(command) == 0
    assert "already complete" in capsys.readouterr().out


def test_a_restart_builds_its_data_again_where_the_earlier_run_had_it(here):
    words = ["train", "run.yaml", "data.root=runs/run/data", "--restart"]
    assert [main(words), main(words)] == [0, 0]
    assert (here / "runs" / "run.old-2" / "data").is_dir()
    assert (here / "runs" / "run" / "data").is_dir()


def test_a_restart_with_other_rows_and_columns_that_are_taken_moves_the_run_once(here, capsys):
    (here / "qa.csv").write_text("Question,Response\n" + "".join(f"q {n},a {n}\n" for n in range(40)))
    words = ["train", "run.yaml", "data.name=qa", "data.sources=[{path: qa.csv}]", "--restart"]
    assert main(words) == 3
    assert ["--yes"] in ways_out(capsys.readouterr().err)
    assert not (here / "runs" / "run.old-1").exists()
    assert main([*words, "--yes"]) == 0
    assert capsys.readouterr().out.count("columns    ") == 1
    assert (here / "runs" / "run.old-1" / "final").is_dir()
    assert flatout.load("run").log.state == "complete"


def test_a_launcher_that_starts_the_command_again_must_not_start_over(here, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(["train", "run.yaml", "--restart"]) == 2
    assert "SLURM_RESTART_COUNT is set by a launcher" in capsys.readouterr().err
    assert (here / "runs" / "run" / "final").is_dir()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert main(["train", "run.yaml", "--restart"]) == 0


def test_the_settings_of_a_run_folder_can_start_it_over(here):
    assert main(["train", "runs/run/config.yaml", "batch.max_steps=3", "--restart"]) == 0
    assert flatout.load("run").config.batch.max_steps == 3
    assert flatout.load("run.old-1").config.batch.max_steps == 2


def test_python_is_told_in_python_and_starts_over(here):
    with pytest.raises(CheckpointError) as raised:
        flatout.train("run.yaml", lr=1e-4)
    said = str(raised.value)
    assert '  try name="run-2"  # a run of its own' in said
    assert "  try restart=True  # start over" in said
    assert '  try checkpoint={"allow_change": ["optim.lr"]}' in said
    assert flatout.train("run.yaml", lr=1e-4, restart=True).config.optim.lr == 1e-4
    assert flatout.load("run.old-1").log.state == "complete"


def test_torch_is_imported_after_its_variables_are_set(here):
    code = (
        "import os, sys, flatout\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('PYTORCH_ALLOC_CONF'), 'TORCHINDUCTOR_CACHE_DIR' in os.environ, flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "flatout.train('run.yaml', seed=1, restart=True)\n"
    )
    unset = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=here, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"expandable_segments:True,.* True\n", done.stdout)


def test_runs_are_listed_sorted_and_as_json(here, capsys):
    shutil.copytree(here / "runs" / "run", here / "runs" / "b" / "inner")
    (here / "runs" / "b" / "inner" / "end.json").unlink()
    metrics = here / "runs" / "b" / "inner" / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if json.loads(line)["kind"] != "eval"))
    (here / "runs" / "no-run").mkdir()
    assert main(["runs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["run", "state", "steps", "on", "before", "after"]
    assert head.split()[6:] == ["best", "time", "size", "model", "data"]
    assert {line.split()[0]: line.split()[3] for line in lines} == {"run": "eval", "b/inner": "train"}
    assert {line.split()[0]: line.split()[1] for line in lines} == {"run": "complete", "b/inner": "killed"}
    assert all(line.split()[-2:] == ["model", "chats"] for line in lines)
    assert main(["runs", "--sort", "name", "--reverse", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["run", "b/inner"]
    evals = flatout.load("run").log.evals
    assert [rows[0][name] for name in ("steps", "planned_steps", "loss_before", "loss_after")] == [
        2, 2, evals[0].eval_loss, evals[-1].eval_loss,
    ]  # fmt: skip
    assert rows[0]["size_bytes"] == sum(map(len, contents(here / "runs" / "run").values()))
    assert main(["runs", "runs/no-run"]) == 0
    assert "no runs in runs/no-run; train one" in capsys.readouterr().out


def _listed(folder: Path, list_of: Any) -> Any:
    if folder.name == "lost":
        raise PermissionError(13, "Permission denied", str(folder))
    return list_of(folder)


def test_a_damaged_run_does_not_hide_the_others(here, capsys, monkeypatch):
    shutil.copytree(here / "runs" / "run", here / "runs" / "broken")
    (here / "runs" / "broken" / "start.json").write_text("{")
    # a folder that cannot be listed, for root too
    (here / "runs" / "gone").symlink_to(here / "runs" / "gone")
    monkeypatch.setattr(Path, "iterdir", lambda path, list_of=Path.iterdir: _listed(path, list_of))
    (here / "runs" / "lost").mkdir()
    assert main(["runs"]) == 0
    _, *lines, problem = capsys.readouterr().out.splitlines()
    assert problem.startswith("runs/broken/start.json: ")
    states = {line.split()[0]: line.split()[1] for line in lines}
    assert states == {"run": "complete", "broken": "damaged"}


def test_runs_are_found_by_name(here, capsys):
    for words, printed in (
        ("report run --format md", "# run: complete"),
        ("watch run", "summary    complete, 2 of 2 steps"),
        ("chat run --prompt Hello --max-new-tokens 1 --temperature 0 --device cpu", ""),
        ("merge run --out merged", "with 14 layers of"),
        ("export run --to gguf --out gguf", "written"),
    ):
        assert main(words.split()) == 0
        assert printed in capsys.readouterr().out
    # a name that is nearly a run's is asked back before any hub
    more = {"merge": "--out x", "export": "--to gguf --out x", "push": "me/x", "eval": "--tasks a"}
    for verb in ("report", "watch", "chat", "merge", "export", "push", "track", "eval"):
        assert main([verb, "runn", *more.get(verb, "").split()]) == 2
        assert "did you mean run?" in capsys.readouterr().err


def test_a_name_that_ends_like_a_file_is_a_file(here, capsys):
    assert main(["chat", "model.gguf", "--prompt", "x"]) == 2
    assert "there is no file model.gguf" in capsys.readouterr().err
    assert main(["chat", "runs/run/final/adapter_model.safetensors", "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert "adapter_model.safetensors is a file; name the folder" in error
    assert "runs/run/final" in error


def test_results_of_a_run_are_waited_for_while_it_trains_and_else_come_from_resuming_it(here, capsys):
    shutil.rmtree(here / "runs" / "run" / "final")
    for words in ("merge run --out x", "chat run --prompt a", "push run me/x"):
        with RunLock(here / "runs" / "run"):  # as while it trains
            assert main(words.split()) == 2
            said = capsys.readouterr().err
            assert "resume" not in said
            assert said.strip().endswith("wait for it: flatout watch runs/run")
        assert main(words.split()) == 2
        command = capsys.readouterr().err.strip().partition("resume it: flatout ")[2].split()
        assert command == ["train", "runs/run/config.yaml"]
    assert main(["watch", "runs/run"]) == 0
    assert main(command) == 0
    assert (here / "runs" / "run" / "final").is_dir()


def test_no_other_run_is_proposed_to_a_verb_that_changes_or_sends_one(here, capsys):
    for words in ("runs --tag nope X", "runs --note nope X", "push nope me/x", "push runs/rune me/x", "track nope"):
        assert main(words.split()) == 2
        assert ways_out(capsys.readouterr().err) == []
    assert main(["runs", "--tag", "run", "X"]) == 0


def test_a_run_that_fails_early_is_a_run(here, capsys):
    assert main(["train", "run.yaml", "name=early", "model.revision=x"]) != 0
    assert (here / "runs" / "early" / "run.json").is_file()
    assert main(["runs"]) == 0
    assert "early" in capsys.readouterr().out
    assert main(["train", "run.yaml", "name=early"]) == 0


def test_runs_have_notes_and_tags_that_every_page_shows(here, capsys):
    before = contents(here / "runs" / "run")
    shutil.copytree(here / "runs" / "run", here / "runs" / "other")
    assert main(["runs"]) == 0
    assert "tags" not in capsys.readouterr().out.splitlines()[0]
    note = "the <b>first</b> try\nwith a longer warm-up"
    with RunLock(here / "runs" / "run"):  # as while it trains
        assert main(["runs", "--tag", "run", "baseline", "v2", "--note", "run", note]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "tags"]
    assert [row.split()[:3] for row in rows] == [["other", "complete", "-"], ["run", "running", "baseline,v2"]]
    assert "the <b>first</b> try with a longer warm-up" in rows[1]
    assert main(["runs", "--untag", "run", "v2", "--tagged", "baseline", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["tags"], row["note"]) == ("run", ["baseline"], note)
    assert main(["runs", "--tagged", "v2"]) == 0
    assert "no run in runs has the tag v2" in capsys.readouterr().out
    for runs in (["run"], ["run", "other"]):
        for form in ("html", "md", "json"):
            out = here / f"{len(runs)}.{form}"
            assert main(["report", *runs, "--format", form, "--out", str(out)]) == 0
            assert "baseline" in out.read_text()
            assert ("<b>first</b>" in out.read_text()) == (form == "json")
    # a run's settings may hold more and longer tags than are added here
    many = RunNotes("", (*map(str, range(30)), "x" * 60))
    (here / "notes.json").write_text(json.dumps({"tags": many.tags}))
    assert write_notes(here, note="kept", add=many.tags) == RunNotes("kept", tuple(sorted(many.tags)))
    with pytest.raises(UsageError, match="32 tags"):
        write_notes(here, add=["one-more"])
    after = contents(here / "runs" / "run")
    assert after.pop("notes.json")
    assert after | {".lock": b""} == before | {".lock": b""}
    # a new run of that name starts without them
    assert main(["train", "run.yaml", "--restart"]) == 0
    assert not (here / "runs" / "run" / "notes.json").exists()
    assert (here / "runs" / "run.old-1" / "notes.json").exists()


def test_what_cannot_be_a_note_or_tag_is_said(here, capsys):
    for words, said in (
        (["--tag", "rum", "a"], "did you mean run?"),
        (["--tag", "run"], "--tag run"),
        (["--tag", "run", "a/b"], "tag 'a/b'"),
        (["--untag", "run", "a"], "has no tag 'a'"),
        (["--note", "run", "n" * 4001], "4,001 characters"),
        (["--note", ".", "text"], "is not the folder of a run"),
    ):
        assert main(["runs", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (here / "runs" / "run" / "notes.json").exists()


@pytest.mark.parametrize("name", ["start.json", "end.json", "notes.json"])
def test_a_damaged_side_file_is_said_in_one_line_and_hides_nothing_else(here, capsys, name):
    folder = here / "runs" / "run"
    write_notes(folder, note="first try", add=["baseline"])
    assert not flatout.load("run").log.problems
    kept = (folder / name).read_bytes()
    for damaged in (kept[:-9], b"[]", b'{"note": 3, "tags": 4}', b"\xff\xfe\x00"):
        (folder / name).write_bytes(damaged)
        assert main(["runs", "--sort", "loss"]) == 0
        _, row, problem = capsys.readouterr().out.splitlines()
        assert row.split()[:2] == ["run", "complete" if name == "notes.json" else "damaged"]
        assert problem.startswith(f"runs/run/{name}: ")
        assert problem.endswith("repair the file, or move it away")
        assert main(["runs", "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["steps"], listed["problems"]) == (2, [problem])
        assert listed["tags"] == ([] if name == "notes.json" else ["baseline"])
        for words in (["report", "run", "--format", "md"], ["watch", "run"]):
            assert main(words) == 0
            assert f"runs/run/{name}: " in capsys.readouterr().out
        # a note may be a person's: it is not written over
        assert main(["runs", "--tag", "run", "v2", "--untag", "run", "v2"]) == (3 if name == "notes.json" else 0)
        assert (f"runs/run/{name}: " in capsys.readouterr().err) == (name == "notes.json")
        assert (folder / name).read_bytes() == damaged
    (folder / name).write_bytes(kept)
    assert not flatout.load("run").log.problems
    assert main(["runs", "--tag", "run", "v2"]) == 0


# what reading the settings, the data and the model refuses; unit/trainer/test_start_check.py has more of the last
REFUSED_AT_START = {
    "data.name=new data.sources=[{path: odd.csv}]": (3, "odd.csv:1: no known format"),
    "objective=nix.py:Loss": (2, "nix.py"),
    "track=comet": (2, "comet"),
    "gpus=[0,1] lora.targets=q_porj": (2, "matches no linear layer"),
}


def test_what_a_start_would_refuse_leaves_the_earlier_run_where_it_is(here, capsys):
    (here / "odd.csv").write_text("alpha,beta\n1,2\n")
    (here / "theirs").mkdir()
    before = contents(here / "runs" / "run") | {".lock": b""}
    for words, (code, said) in REFUSED_AT_START.items():
        assert main(["train", "run.yaml", *re.split(r" (?=[a-z_.]+=)", words), "--restart"]) == code, words
        assert said in capsys.readouterr().err
        assert contents(here / "runs" / "run") | {".lock": b""} == before, words
        assert not (here / "runs" / "run.old-1").exists()
