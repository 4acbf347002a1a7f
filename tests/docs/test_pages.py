"""The documentation is true: its commands and code run as written, its error messages exist, its site builds."""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml
from usual import usual

from flatout.cli.main import main
from flatout.config.read import load_config
from flatout.demo.conversations import sample_conversations
from flatout.demo.write import write_demo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"(?:<!-- test: (.*?) -->\n)?^( *)```(\w+)\n(.*?)^ *```$", re.M | re.S)
# pages whose blocks are commands of this repository, which their own tests and benchmarks run
OF_DEVELOPERS, NOT_RUN = {"measurements.md", "performance.md", "numerics.md"}, {"reference", "lab"}
PAGES = sorted(
    page for page in (*DOCS.rglob("*.md"), ROOT / "README.md")
    if page.name not in OF_DEVELOPERS and page.parent.name not in NOT_RUN and FENCE.search(page.read_text())
)  # fmt: skip
# commands of other programs, which only have to be well formed
OTHERS = {"make", "cd", ".", "ssh", "pip", "python", "torchrun", "srun", "docker", "vllm", "ollama", "pytest"}
OTHERS |= {"conda", "hf", "apt", "npm", "python3", "uv"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the files that the pages speak of: a model under its hub id, rows, a configuration."""
    folder = tmp_path_factory.mktemp("world")
    write_demo(folder / "demo", 1, num_train=200, num_held_out=1)
    base = {"model": {"name": str(folder / "demo" / "model"), "init": "random"}, "device": "cpu"}
    rows = [{"messages": messages} for messages in sample_conversations(24, 1, held_out=False)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"What is {k}?", "chosen": f"A number, {k}.", "rejected": "No idea."} for k in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "other-pairs.jsonl").write_text((folder / "pairs.jsonl").read_text())
    (folder / "qa.csv").write_text("question,answer\n" + "".join(f"What is {k}?,A number {k}.\n" for k in range(40)))
    judged = [
        {"prompt": one["prompt"], "completion": one["chosen"], "label": k % 2 == 0} for k, one in enumerate(pairs)
    ]
    (folder / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    answers = [{"token_ids": [20 + k, 9], "logprobs": [-1, -1], "reward": k} for k in range(2)]
    (folder / "rollouts.jsonl").write_text((json.dumps({"prompt_ids": [5, 6], "answers": answers}) + "\n") * 24)
    values = {**base, "data": {"sources": [{"path": str(folder / "chats.jsonl")}]}, "name": "pretrained"}
    (folder / "full.yaml").write_text(yaml.safe_dump({**values, "method": "full", "run_dir": str(folder / "made")}))
    assert main(["train", str(folder / "full.yaml"), "batch.max_steps=1"]) == 0
    shutil.copytree(folder / "made" / "final", folder / "Qwen" / "Qwen3-0.6B")
    (folder / "questions.jsonl").write_text(json.dumps({"prompt": "Hello", "answer": "Hi"}) + "\n")
    problems = [{"question": f"What is {k} and {k}?", "answer": f"#### {2 * k}"} for k in range(24)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    (folder / "rewards.py").write_text("def short(answer, row):\n    return 1 - len(answer) / 2000\n")
    rollout = {"rounds": 2, "prompts": 2, "group": 4, "max_new_tokens": 8, "rewards": ["number", "rewards.py:short"]}
    rounds = {"name": "rl", "model": "Qwen/Qwen3-0.6B", "device": "cpu", "objective": "grpo", "rollout": rollout}
    (folder / "rl.yaml").write_text(yaml.safe_dump({**rounds, "data": {"sources": [{"path": "gsm8k.jsonl"}]}}))
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": "Qwen/Qwen3-0.6B", "data": "chats", "device": "cpu"}))
    with contextlib.chdir(folder):
        for name in ("chats", "code"):
            assert main(["data", "build", "chats.jsonl", "--name", name, "--tokenizer", "Qwen/Qwen3-0.6B"]) == 0
        assert main(["train", "run.yaml"]) == 0
    for copy in ("runs/a", "runs/b", "runs/c", "demo-run/run"):
        shutil.copytree(folder / "runs" / "run", folder / copy)
    return folder


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what the comment above says (or ""), the language and the text of each block."""
    for note, indent, language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        yield note, language, re.sub(f"^{indent}", "", text, flags=re.M)


# what most people read first; the others run the same verbs and calls with other settings
@pytest.mark.parametrize("page", usual(PAGES, [ROOT / "README.md"]), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, world, tmp_path, monkeypatch):
    """In the order of the page, in one folder; `<!-- test: WHY -->` above a block says why it cannot run here."""
    here = tmp_path / "work"
    shutil.copytree(world, here)
    if "flatout init" in (text := page.read_text()):
        (here / "run.yaml").unlink()
    if "flatout init" in text or ("flatout.train(" in text and not re.search("^ *flatout train", text, re.M)):
        shutil.rmtree(here / "runs")
    monkeypatch.chdir(here)
    names: dict[str, Any] = {}
    for note, language, text in blocks(page):
        match language:
            case "bash":
                for line in text.replace("\\\n", " ").splitlines():
                    run_line(line, note, monkeypatch)
            case "python" if note:
                ast.parse(text)
            case "python":
                names = run_script(here / "block.py", text, names, times=2 if page.name == "README.md" else 1)
            case "yaml" if not note:
                sections = {"model": "Qwen/Qwen3-0.6B", "data": "chats", **yaml.safe_load(text)}
                (here / "block.yaml").write_text(yaml.safe_dump(sections))
                load_config(here / "block.yaml")
            case "json":
                json.loads(text)


def run_script(path: Path, text: str, names: dict[str, Any], *, times: int) -> dict[str, Any]:
    """Run a script with names of the blocks above; one that stands alone can be run again."""
    path.write_text(text)
    for _ in range(times):
        found = runpy.run_path(str(path), init_globals=names)
    return found


def run_line(line: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one line of a block. With a note, only show that the command exists, or run it with settings added."""
    typed, _, piped = line.partition(" | ") if line.startswith("echo") else ("", "", line)
    words = shlex.split(piped, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if not words or words[0] in OTHERS or words[0].startswith("hypersloth-"):
        if words[:2] == ["pip", "install"]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\[(\w+)\]", piped)) <= set(extras), line
        return
    assert words[0] == "flatout", line
    if note.startswith("with "):
        words += note.removeprefix("with ").split()
    elif note:
        words = ["flatout", words[1], "--help"]
        with pytest.raises(SystemExit, match="0"):
            main(words[1:])
        return
    monkeypatch.setattr(sys, "stdin", io.StringIO(" ".join(shlex.split(typed)[1:]) + "\n"))
    assert main(words[1:]) == 0, line


def literals() -> str:
    """All text of the package's code; what is filled in is `…`."""
    found = []
    for file in sorted((ROOT / "flatout").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(headings) >= 20
    text = literals()
    for heading in headings:
        for part in filter(None, (part.strip() for part in heading.split("…"))):
            assert len(part) < 8 or part in text, (heading, part)


def test_the_page_of_metrics_is_the_table_of_figures():
    page = DOCS / "reference" / "metrics.md"
    generate = runpy.run_path(str(page.with_name("generate.py")))
    assert page.read_text() == "\n".join(generate["metrics"]()), "python docs/reference/generate.py"


@pytest.mark.skipif(find_spec("zensical") is None, reason="needs the `docs` extra")
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("docs", "mkdocs.yml", "flatout"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for command in ([sys.executable, "docs/reference/generate.py"], [sys.executable, "-m", "zensical", "build", "-s"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    if sys.version_info[:2] == (3, 11):  # argparse prints help in another form later
        for page in (DOCS / "reference").glob("*.md"):
            fresh = (tmp_path / "docs" / "reference" / page.name).read_text()
            assert page.read_text() == fresh, f"{page.name} is out of date: python docs/reference/generate.py"
    site = tmp_path / "build" / "docs"
    assert "optim.lr" in (site / "reference" / "settings" / "index.html").read_text()
    # mkdocstrings found the functions
    assert "objective" in (site / "reference" / "python" / "index.html").read_text()
    assert "optim.lr" in (site / "search.json").read_text()
    num_clicks, dead = walk(site)
    assert not dead
    assert {page for page in site.rglob("*.html") if page.name != "404.html"} == num_clicks.keys()
    assert max(num_clicks.values()) <= 2


@pytest.mark.parametrize("version", ["0.10.0", "0.11.0.dev0"])
def test_a_version_of_the_site_joins_those_that_are_there(tmp_path, monkeypatch, version):
    site, built = tmp_path / "site", tmp_path / "built"
    for folder in (site / "0.9.1", site / "0.10.0rc1", site / "dev", built):
        folder.mkdir(parents=True)
        (folder / "index.html").write_text(folder.name)
    monkeypatch.setattr("flatout.__version__", version)
    monkeypatch.setattr("sys.argv", ["versions.py", str(built), str(site)])
    runpy.run_path(str(DOCS / "reference" / "versions.py"), run_name="__main__")
    is_release = version == "0.10.0"
    assert (site / ("0.10.0" if is_release else "dev") / "index.html").read_text() == "built"
    rows = json.loads((site / "versions.json").read_text())
    newest_first = ["dev", *["0.10.0"] * is_release, "0.10.0rc1", "0.9.1"]
    assert [row["version"] for row in rows] == [row["title"] for row in rows] == newest_first
    latest = "0.10.0" if is_release else "0.9.1"
    assert [row["version"] for row in rows if row["aliases"] == ["latest"]] == [latest]
    assert f"url={latest}/" in (site / "index.html").read_text()


def walk(site: Path) -> tuple[dict[Path, int], list[str]]:
    """Follow the links of a site from its start; return the clicks to each page, and links that lead nowhere."""
    num_clicks, dead, pages = {site / "index.html": 0}, list[str](), [site / "index.html"]
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    for page in pages:  # grows as pages are found
        for link in re.findall(r'(?:href|src)="([^"]+)"', texts[page]):
            address = urlsplit(urljoin(page.as_uri(), html.unescape(link)))
            if address.scheme != "file":
                continue
            target = Path(unquote(address.path))
            target = target / "index.html" if address.path.endswith("/") or target.is_dir() else target
            anchor = unquote(address.fragment)
            is_found = target in texts if target.suffix == ".html" else target.is_file()
            if not is_found or (anchor and target in texts and f'id="{anchor}"' not in texts[target]):
                dead.append(f"{page.relative_to(site)}: {link}")
            elif target in texts and target not in num_clicks:
                num_clicks[target] = num_clicks[page] + 1
                pages.append(target)
    return num_clicks, dead
