"""A tiny world for tests of whole runs: real chats, a real tokenizer and a random Qwen3-shaped model, made once."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Test processes share the cores: a thread pool each, in every rank they start, is many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of tests start processes. Without .pyc files, each compiles flatout's source again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A test changes code in its process, which no key of kept proofs holds; tests of kept proofs remove this.
os.environ["FLATOUT_CHECK_AGAIN"] = "1"
# Tests are collected in half of the time without collections, and what they import is never garbage.
gc.disable()


def rotate_gpus(num_gpus: int, process: str) -> None:
    """Put another GPU first for each pytest-xdist process, as most tests use the first: all would share its memory."""
    first = int(process.removeprefix("gw") or 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + offset) % num_gpus) for offset in range(num_gpus))


if gpus := os.environ.get("FLATOUT_TEST_GPUS"):  # set by benchmarks/gpu_suite.py: counting here would fix the order
    rotate_gpus(int(gpus), os.environ.get("PYTEST_XDIST_WORKER", ""))


@dataclass(frozen=True)
class Tiny:
    """`model_dir` holds safetensors weights and the tokenizer; `chats` a jsonl of OpenAI messages."""

    root: Path
    model_dir: Path
    chats: Path

    def config(self, run_dir: Path, *overrides: str, **sections: Any) -> Any:
        """A config of an fp32 CPU run on the chats; sections such as `batch={...}` go on top."""
        from flatout.config.read import make_config

        values: dict[str, Any] = {
            "run_dir": str(run_dir),
            "device": "cpu",
            "seed": 7,
            "model": {"name": str(self.model_dir), "precision": "fp32"},
            "data": {
                "name": "chats",
                "root": str(self.root / "data"),
                "sources": [{"path": str(self.chats)}],
                "max_tokens": 500,
            },
            "lora": {"rank": 4, "alpha": 8},
            "batch": {"samples_per_step": 6, "micro_batch_tokens": 700, "max_steps": 8},
            "optim": {"lr": 1e-3},
            "checkpoint": {"every_steps": None},
            # answers take longer than the evaluations of these few rows; tests of answers set prompts
            "eval": {"prompts": []},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        if values.get("method") == "full" or "method=full" in overrides:
            del values["lora"]  # so that one set of sections serves both methods
        return make_config(values, overrides)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from flatout.demo.conversations import sample_conversations
    from flatout.demo.write import train_tokenizer

    root = tmp_path_factory.mktemp("tiny")
    conversations = list(sample_conversations(120, 0, held_out=False))
    chats = root / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    tokenizer = train_tokenizer((m["content"] for messages in conversations for m in messages), 512)
    model_dir = root / "model"
    tokenizer.save_pretrained(model_dir)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(model_dir)
    return Tiny(root, model_dir, chats)


@pytest.fixture(scope="session", params=["longrope", pytest.param("dynamic", marks=pytest.mark.exhaustive)])
def length_scaled(request, tiny, tmp_path_factory):
    """A model folder whose rope depends on the length of its input, with chats on both sides of its limit."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    AutoTokenizer.from_pretrained(tiny.model_dir).save_pretrained(folder)
    limit = 64
    factors = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.5, 4.0, 8.0]}
    rope = {
        "longrope": {**factors, "original_max_position_embeddings": limit, "factor": 8.0},
        "dynamic": {"factor": 4.0},
    }
    shape = json.loads((tiny.model_dir / "config.json").read_text())
    sizes = {name: shape[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    config = LlamaConfig(
        **sizes,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=8,
        pad_token_id=shape["pad_token_id"],
        max_position_embeddings=limit if request.param == "dynamic" else 2048,
        rope_parameters={"rope_type": request.param, "rope_theta": 10000.0, **rope[request.param]},
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def read_metrics(run_dir: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The records of a run, a later line for a step replacing an earlier one."""
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line for line in lines if line["kind"] == kind}.values())


@pytest.fixture(scope="session", autouse=True)
def warm_ranks():
    """Ranks that a test's own process starts are forked from one that has imported torch: seconds for each."""
    import warm_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatout.launch.ranks.start_python", warm_process.start_python)
        yield


@pytest.fixture(autouse=True)
def plain_torch():
    """No test leaves torch deterministic, which a run may ask for: the next one might not compile."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def real_ranks(monkeypatch):
    """For tests of how ranks begin."""
    from flatout.io import own_files
    from flatout.launch import ranks

    monkeypatch.setattr(ranks, "start_python", own_files.start_python)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked gpu where there is none, unless Triton's interpreter stands in for it."""
    if item.get_closest_marker("gpu") and os.environ.get("TRITON_INTERPRET") != "1":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.hookimpl(trylast=True)  # of what is left after -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, by the seconds of the last record: one that starts last holds up the suite."""
    if not (record := os.environ.get("FLATOUT_SLOW_TESTS")):
        return
    seconds: dict[str, float] = json.loads(Path(record).read_text()).get("slow_tests", {})
    items.sort(key=lambda item: -seconds.get(item.nodeid, 0.0))
    # each process is given two tests at once: a long one and a short one
    num_pairs = min(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)), len(items) // 2)
    long, between, short = items[:num_pairs], items[num_pairs : len(items) - num_pairs], items[len(items) - num_pairs :]
    items[:] = [item for pair in zip(long, short, strict=True) for item in pair] + between


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-golden", action="store_true", help="write tests/golden/losses.json anew")


@pytest.fixture
def metrics_of():
    return read_metrics


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a failure to FLATOUT_FAILURES_FILE at once: pytest prints them at its end, which a time limit may cut."""
    path = os.environ.get("FLATOUT_FAILURES_FILE")
    if report.failed and path and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}\n\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the fuzz's counts; here, as pytest-xdist's main process reads no conftest below this folder."""
    found: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, counts in getattr(report, "user_properties", ()):
                if name == "fuzz" and report.when == "call":
                    found.update(counts)
    if found:
        kinds = ("cases", "tracebacks", "accepted-wrong", "unclear")
        terminalreporter.write_line("fuzz: " + ", ".join(f"{found[kind]:,} {kind}" for kind in kinds))


@pytest.fixture(scope="session")
def open_chromium():
    """Open a headless Chromium with further arguments, and keep what its console says; skips without Chromium."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver")

    def open_browser(*arguments: str) -> Any:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *arguments):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        return webdriver.Chrome(options, webdriver.ChromeService(driver))

    return open_browser
