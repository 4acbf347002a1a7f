"""Runs what other trainers document, as written, on flatout; `manifest-SYSTEM.json` beside this file has the rows.

A manifest has `cases` and `rows`. A case is a folder with files, commands that are typed in it, and how they end. A row
is one documented command, flag, class, field, snippet or file; `how` names the case that runs it, and `check` what must
be seen there: a row has run only if its effect was observed. Models and data sets that a document names are folders of
these names with a tiny model and tiny data, so commands and scripts need no change. A case is not run where
it lacks a GPU (`gpu`) or a package that it `needs`.

    python migrate/tests/front_doors/run_manifest.py                     all; writes benchmarks/results/front-doors.json
    python migrate/tests/front_doors/run_manifest.py --fast               the cases that CI runs
    python migrate/tests/front_doors/run_manifest.py hypersloth unsloth:cli    a system, or one case of it

The rows of cases that were run replace those in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "front-doors.json"
MIGRATE = ROOT / "migrate"
# what identifies a row of a system
KEY = ("what", "how", "kind")
KINDS = {"command", "flag", "class", "field", "function", "snippet", "file"}
CASE_KEYS = {
    "fast", "gpu", "needs", "skip", "after", "files", "copy", "edit", "env", "commands", "stdin", "run", "exit"
}  # fmt: skip
TIMEOUT_S = 600


@dataclass(frozen=True)
class Outcome:
    """How a case ended: the exit code of its last command, everything printed, and its folder."""

    exit_code: int
    output: str
    folder: Path
    run: Path | None
    seconds: float

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings of the run."""
        import yaml

        assert self.run is not None, "the case names no run"
        return yaml.safe_load((self.run / "config.yaml").read_text())


@dataclass
class Manifest:
    """One system's rows and cases."""

    path: Path
    world: dict[str, Any]
    cases: dict[str, dict[str, Any]]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        values = json.loads(path.read_text())
        manifest = cls(path, values.get("world", {}), values["cases"], values["rows"])
        for name, case in manifest.cases.items():
            assert case.keys() <= CASE_KEYS, f"{path.name}: case {name}: unknown {case.keys() - CASE_KEYS}"
        for row in manifest.rows:
            where = f"{path.name}: {row}"
            assert row["kind"] in KINDS, where
            assert row["how"] in manifest.cases, where
            assert row["expected"] == "ran" or row["expected"].startswith("error: "), where
            assert row["expected"] != "ran" or row.get("check"), f"{where} observes nothing"
            for check in checks_of(row):
                is_listed = isinstance(check.get("is"), list) and any(isinstance(part, dict) for part in check["is"])
                # sources gain fields, which are no concern of a document
                assert not is_listed, f"{where}: check the fields that matter, such as data.sources.0.path"
        return manifest


def checks_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    checks = row.get("check", [])
    return checks if isinstance(checks, list) else [checks]


@cache
def manifests() -> dict[str, Manifest]:
    """All manifests by system, from the names of the files."""
    return {path.stem.removeprefix("manifest-"): Manifest.read(path) for path in sorted(HERE.glob("manifest-*.json"))}


@dataclass
class Runner:
    """Runs cases below one folder, each once. A folder `warm` has other programs for the cases that CI runs."""

    root: Path
    warm: Path | None = None
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        write_world(self.root / "world")
        write_commands(self.root / "bin")

    def outcome(self, system: str, name: str) -> Outcome:
        """Run a case, or return how it ended."""
        if (system, name) not in self.outcomes:
            self.outcomes[system, name] = self._run(manifests()[system], system, name)
        return self.outcomes[system, name]

    def _run(self, manifest: Manifest, system: str, name: str) -> Outcome:
        case, folder = manifest.cases[name], self.root / system / name
        if "after" in case:
            # later cases go on from here, so the folder itself stays
            shutil.copytree(self.outcome(system, case["after"]).folder, folder, symlinks=True)
        else:
            folder.mkdir(parents=True)
            for model in manifest.world.get("models", ()):
                link(folder / model, self.root / "world" / "model")
            for data, kind in manifest.world.get("data", {}).items():
                link(folder / data, self.root / "world" / kind)
        for file, source in case.get("copy", {}).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, folder / file)
        for file, lines in case.get("files", {}).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("\n".join(lines) + "\n")
        for file, edits in case.get("edit", {}).items():
            text = (folder / file).read_text()
            for old, new in edits:
                assert old in text, f"{name}: {file} lacks {old!r}"
                text = text.replace(old, new)
            (folder / file).write_text(text)
        started_at, output, code = time.monotonic(), "", 0
        for command in case["commands"]:
            code, printed = self._type(command, folder, case)
            output += f"$ {command}\n{printed}"
            if code:
                break
        (folder.parent / f"{name}.log").write_text(output)
        run = folder / case["run"] if "run" in case else None
        return Outcome(code, output, folder, run, time.monotonic() - started_at)

    def _type(self, command: str, folder: Path, case: dict[str, Any]) -> tuple[int, str]:
        """Type a command into a shell, as a reader of the document does."""
        names = MIGRATE / "flatout_migrate" / "names"
        warm = [self.warm] if self.warm and case.get("fast") else []
        env = {
            **os.environ,
            "PATH": os.pathsep.join(
                map(str, [*warm, self.root / "bin", Path(sys.executable).parent, os.environ["PATH"]])
            ),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, MIGRATE, names))),
            "REPOSITORY": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # torchrun starts ranks by it
            "PYTHON_EXEC": str((warm or [Path(sys.executable).parent])[0] / "python"),
            # a tmux server of this folder's own; its socket's path must be short
            "TMUX_TMPDIR": str(self.root / "bin"),
            **({} if case.get("gpu") else {"ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}),
            **case.get("env", {}),
        }
        stdin = (folder / case["stdin"]).read_text() if "stdin" in case else ""
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, input=stdin, text=True, timeout=TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


def problem(case: dict[str, Any], row: dict[str, Any], outcome: Outcome, runner: Runner, system: str) -> str | None:
    """Return why a row counts as failed, or None."""
    if (code := outcome.exit_code) != case.get("exit", 0):
        return f"exit code {code}: {outcome.output.strip()[-300:]}"
    if row["expected"].startswith("error: "):
        reason = row["expected"].removeprefix("error: ")
        if code == 0:
            return "it ended without an error"
        return None if squeezed(reason) in squeezed(outcome.output) else f"the error does not say {reason!r}"
    if outcome.run is not None and code == 0 and not is_complete(outcome.run):
        return "the run is not complete"
    return next((why for check in checks_of(row) if (why := unseen(check, outcome, runner, system))), None)


def unseen(check: dict[str, Any], outcome: Outcome, runner: Runner, system: str) -> str | None:
    """Return what was expected and not observed, or None."""
    if "setting" in check:
        found: Any = outcome.settings
        for part in check["setting"].split("."):
            found = found[int(part) if isinstance(found, list) else part]
        return None if found == check["is"] else f"{check['setting']} is {found!r}, expected {check['is']!r}"
    if "prints" in check:
        return None if squeezed(check["prints"]) in squeezed(outcome.output) else f"does not print {check['prints']!r}"
    if "file" in check:
        files = list(outcome.folder.glob(check["file"]))
        text = check.get("contains", "")
        found = files and (not text or any(text in file.read_text() for file in files))
        return None if found else f"no file {check['file']} {f'with {text!r}' if text else ''}"
    if "losses_of" in check:
        other = runner.outcome(system, check["losses_of"])
        own, others = losses(outcome), losses(other)
        return None if own and own == others else f"losses {own[:3]} differ from {others[:3]} of {check['losses_of']}"
    raise AssertionError(f"unknown check {check}")


def squeezed(text: str) -> str:
    """Return text without the line breaks of an 80 column console."""
    return re.sub(r"\s+", " ", text)


def is_complete(run: Path) -> bool:
    """Whether a run took all of its steps and wrote its final adapter or model."""
    from flatout.track.run_log import read_run

    end = read_run(run).end
    return end is not None and end.outcome == "complete" and (run / "final" / "config.json").parent.is_dir()


def losses(outcome: Outcome) -> list[float]:
    assert outcome.run is not None
    lines = map(json.loads, (outcome.run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def link(target: Path, source: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)


def write_commands(folder: Path) -> None:
    """Write the commands of migrate/pyproject.toml, as pip does."""
    folder.mkdir(exist_ok=True)
    project = tomllib.loads((MIGRATE / "pyproject.toml").read_text())["project"]
    for name, target in project["scripts"].items():
        module, function = target.split(":")
        lines = [f"#!{sys.executable}", "import sys", f"from {module} import {function}", f"sys.exit({function}())"]
        (folder / name).write_text("\n".join(lines) + "\n")
        (folder / name).chmod(0o755)


def write_world(folder: Path) -> None:
    """Write a tiny Qwen3 with its tokenizer, and the same conversations in the formats that documents name."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from flatout.demo.conversations import sample_conversations
    from flatout.demo.write import train_tokenizer

    chats = list(sample_conversations(200, 0, held_out=False))
    roles = {"user": "human", "assistant": "gpt", "system": "system"}
    shapes = {
        "messages": lambda chat: {"messages": chat},
        "sharegpt": lambda chat: {
            "conversations": [{"from": roles[turn["role"]], "value": turn["content"]} for turn in chat]
        },
        "alpaca": lambda chat: {"instruction": chat[-2]["content"], "input": "", "output": chat[-1]["content"]},
        "text": lambda chat: {"text": "\n".join(turn["content"] for turn in chat)},
    }
    for kind, shape in shapes.items():
        (folder / kind).mkdir(parents=True)
        (folder / kind / "train.jsonl").write_text("".join(json.dumps(shape(chat)) + "\n" for chat in chats))
    tokenizer = train_tokenizer((turn[key] for chat in chats for turn in chat for key in ("role", "content")), 512)
    tokenizer.save_pretrained(folder / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32_768, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def judge(runner: Runner, system: str, name: str) -> list[dict[str, Any]]:
    """Run one case and return its rows with their results."""
    manifest = manifests()[system]
    case, rows = manifest.cases[name], [row for row in manifest.rows if row["how"] == name]
    missing = [package for package in case.get("needs", ()) if find_spec(package) is None]
    skip = f"it needs {missing[0]}" if missing else case.get("skip")
    if skip := "it needs a GPU" if case.get("gpu") and not has_gpu() else skip:
        results = [f"not run: {skip}" for _ in rows]
    else:
        outcome = runner.outcome(system, name)
        reasons = [problem(case, row, outcome, runner, system) for row in rows]
        results = [f"failed: {why}" if why else row["expected"] for row, why in zip(rows, reasons, strict=True)]
    return [
        {"door": system, **{key: row[key] for key in ("system", "kind", "what", "how", "expected")}, "result": result}
        for row, result in zip(rows, results, strict=True)
    ]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="SYSTEM[:CASE]", help="what to run (all)")
    parser.add_argument("--fast", action="store_true", help="only the cases that CI runs")
    parser.add_argument("--keep", type=Path, help="folder to keep the cases in, with the output of each")
    args = parser.parse_args()
    known = [(system, name) for system, one in manifests().items() for name in one.cases]
    names = [system for system, _ in known] + [f"{system}:{name}" for system, name in known]
    if unknown := set(args.wanted) - set(names):
        parser.error(f"no system or case {min(unknown)}; the systems are {', '.join(manifests())}")
    judged: dict[tuple[str, str], list[dict[str, Any]]] = {}
    table: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="doors-") as scratch:
        runner = Runner(args.keep or Path(scratch))
        for system, name in known:
            is_wanted = not args.wanted or system in args.wanted or f"{system}:{name}" in args.wanted
            if is_wanted and (manifests()[system].cases[name].get("fast") or not args.fast):
                judged[system, name] = judge(runner, system, name)
                report(system, name, judged[system, name], runner.outcomes.get((system, name)))
                # after each case, as all of them take long
                table = write_results(judged)
    print(json.dumps(table, indent=2))
    return 1 if any(counted["failed"] for counted in table.values()) else 0


def report(system: str, name: str, rows: list[dict[str, Any]], outcome: Outcome | None) -> None:
    wrong = [row for row in rows if row["result"] != row["expected"]]
    seconds = f"{outcome.seconds:.0f} s" if outcome else "-"
    print(f"{system:12} {name:28} {len(rows) - len(wrong):3}/{len(rows)} rows  {seconds}")
    for row in wrong:
        print(f"    {row['kind']} {row['what']}: {row['result']}")
    sys.stdout.flush()


def write_results(judged: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, dict[str, int]]:
    """Write the rows that were judged, and those of other cases as they are in the file; return the counts."""
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = []
    for system, manifest in manifests().items():
        for row in manifest.rows:
            now = judged.get((system, row["how"]), [one for one in old if one["door"] == system])
            rows += [one for one in now if (one["what"], one["how"], one["kind"]) == tuple(map(row.get, KEY))][:1]
    table = {system: counts([row for row in rows if row["door"] == system]) for system in manifests()}
    lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps({"systems": table}, indent=2)
    RESULTS.write_text(head[:-2] + f',\n  "rows": [\n{lines}\n  ]\n}}\n')
    return table


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many rows ran, ended with the error that they name, failed, or were not run."""
    kinds = Counter(row["result"].partition(":")[0] for row in rows)
    return {"rows": len(rows), **{kind: kinds[kind] for kind in ("ran", "error", "failed", "not run")}}


if __name__ == "__main__":
    sys.exit(main())
