"""On a CUDA GPU: a plan that measured passes have corrected is within 5 % of the peak of real steps."""

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_world import PictureWorld, draw, make_picture_model
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from flatout.config.schema import Config
from flatout.parallel.rank import Rank
from flatout.planner.devices import GIB, Device
from flatout.planner.memory import estimate
from flatout.track.callback import Callback, MemoryCallback, Reporter
from flatout.track.record import StepRecord
from flatout.trainer.memory_check import read_record
from flatout.trainer.planned_run import PlannedRun, open_and_plan
from flatout.trainer.run import train

pytestmark = pytest.mark.gpu
SHAPES = {
    "wide": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4},
    "deep": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16},
}


class Told(MemoryCallback):
    """Remembers the lines about memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def on_stage(self, name: str, text: str) -> None:
        if name == "memory":
            self.lines.append(text)

    def starts(self, start: str) -> list[str]:
        return [line for line in self.lines if line.startswith(start)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("FLATOUT_CHECK_AGAIN")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.compiler.reset()


def count_fewer_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory model count 0.7 of what layers save, as constants of another GPU may."""
    count = estimate.activation_elements
    monkeypatch.setattr(estimate, "activation_elements", lambda shape: int(0.7 * count(shape)))


def make_model(tiny: Any, folder: Path, **sizes: int) -> Path:
    shape = Qwen3Config.from_pretrained(tiny.model_dir)
    num_layers = sizes["num_hidden_layers"]
    shape.update({**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64})
    shape.update({"layer_types": ["full_attention"] * num_layers, "max_window_layers": num_layers})
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model_dir).save_pretrained(folder)
    return folder


def planned_for(config: Config, gpu: Device) -> PlannedRun:
    return open_and_plan(config, Reporter(), Rank(), gpu)


def limited(tiny: Any, folder: Path, model_dir: Path, **changes: Any) -> Config:
    """A run whose step takes about two passes: memory for its state and 0.6 of its activations."""
    batch = {"samples_per_step": 100, "max_steps": 3, "micro_batch_tokens": None}
    values = {"model": {"name": str(model_dir)}, "batch": batch, "device": "cuda", **changes}
    free = tiny.config(folder, **values)
    planned = planned_for(free, Device("a GPU", 60 * GIB))
    whole = planned.memory.estimate(planned.plan.largest_pass[2].size)
    assert whole is not None
    need = whole.state_bytes + 0.6 * (whole.activations_bytes + whole.working_bytes)
    limit: Config = tiny.config(folder, **values, memory=need / 0.94 / GIB)
    return limit


def step_peak_bytes(config: Config, *, reuse_measured: bool = False) -> tuple[int, Told]:
    """The peak of the run's steps beyond what this process held before, and what the run told."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, told = torch.cuda.memory_allocated(), Told()
    train(config, callbacks=[told], reuse_measured=reuse_measured)
    lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    peaks = [line["peak_memory_bytes"] for line in lines if line["kind"] == "step"]
    return max(peaks) - before, told


def assert_planned_within(config: Config, peak_bytes: int, share: float = 0.05) -> PlannedRun:
    planned = planned_for(config, read_record(config.folder / "memory.json"))
    found = planned.memory.estimate(planned.plan.largest_pass[2].size)
    assert found is not None
    assert found.total_bytes == pytest.approx(peak_bytes, rel=share)
    return planned


@pytest.mark.parametrize("constants", ["fitted", "of another GPU"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_corrected_plan_is_within_5_percent(tiny, tmp_path, monkeypatch, shape, recompute, constants):
    if constants != "fitted":
        count_fewer_activations(monkeypatch)
    model = make_model(tiny, tmp_path / "model", **SHAPES[shape])
    config = limited(tiny, tmp_path / "run", model, compile="off", recompute=recompute)
    peak_bytes, told = step_peak_bytes(config)
    assert told.starts("measured")
    assert_planned_within(config, peak_bytes)
    if constants != "fitted" and recompute == "none":
        assert "planned again with" in told.starts("measured")[0]


def test_compiled_layers_and_full_fine_tuning_are_within_5_percent(tiny, tmp_path, monkeypatch):
    """Here the plan changes, so the run is built and compiled a second time."""
    count_fewer_activations(monkeypatch)
    model = make_model(tiny, tmp_path / "model", **SHAPES["wide"])
    # kernels for documents, which compiled layers need, are 16-bit
    kinds = {
        "compiled": {"model": {"name": str(model), "precision": "bf16"}},
        "full": {"method": "full", "compile": "off"},
    }
    for name, changes in kinds.items():
        config = limited(tiny, tmp_path / name, model, recompute="none", cuda_graphs="off", **changes)
        assert (config.compile == "auto") == (name == "compiled")
        peak_bytes, told = step_peak_bytes(config)
        assert "planned again with" in told.starts("measured")[0]
        assert_planned_within(config, peak_bytes)


def test_an_equal_start_measures_nothing_and_takes_the_same_steps(tiny, tmp_path, monkeypatch):
    count_fewer_activations(monkeypatch)
    model = make_model(tiny, tmp_path / "model", **SHAPES["deep"])
    plans = []
    for name in ("first", "second"):
        config = limited(tiny, tmp_path / name, model, compile="off", recompute="none")
        peak_bytes, told = step_peak_bytes(config, reuse_measured=True)
        assert bool(told.starts("measured")) == (name == "first")
        plans.append(assert_planned_within(config, peak_bytes))
    assert plans[0].pass_settings == plans[1].pass_settings
    assert plans[0].device is not None
    assert plans[1].device is not None
    assert plans[0].device.corrections == plans[1].device.corrections


def test_measuring_leaves_no_trace_in_the_numbers(tiny, tmp_path):
    """Equal losses with and without measured passes, at the same micro-batches."""
    model = make_model(tiny, tmp_path / "model", **SHAPES["wide"])
    config = limited(tiny, tmp_path / "measured", model, compile="off", recompute="none")
    _, told = step_peak_bytes(config)
    assert told.starts("measured")
    tokens = planned_for(config, read_record(config.folder / "memory.json")).memory.micro_batch_tokens
    batch = {"samples_per_step": 100, "max_steps": 3, "micro_batch_tokens": tokens}
    same = tiny.config(
        tmp_path / "given", model={"name": str(model)}, batch=batch, device="cuda", compile="off", recompute="none"
    )
    _, told = step_peak_bytes(same)
    assert told.starts("not measured: batch.micro_batch_tokens is set")

    def losses(config: Config) -> list[float]:
        lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]

    assert losses(config) == pytest.approx(losses(same), rel=1e-3)


def picture_rows(folder: Path) -> Path:
    """Rows that are alike: two pictures each."""
    (folder / "picture.png").write_bytes(draw(45, 45))
    part = {"type": "image", "path": "picture.png"}
    rows = []
    for index in range(100):
        content = [part, part, {"type": "text", "text": f"what is shown {index:03}?"}]
        rows.append([{"role": "user", "content": content}, {"role": "assistant", "content": "a red square is shown"}])
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("method", ["frozen", "lora", "full"])
def test_pictures_are_as_planned(tmp_path, method):
    """A tower that takes most of the memory, frozen and trained; prints what is planned before it is corrected."""
    world = PictureWorld(tmp_path / "world", wide=True)
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "depth": 12}
    folder = make_picture_model(tmp_path / "model", "qwen3_vl", wide=True, of_tower=sizes)
    frozen = method == "frozen"
    trains = {"precision": "bf16", "freeze_vision_tower": frozen, "freeze_projector": frozen}
    sources = [{"path": str(picture_rows(tmp_path))}]

    class Rows:
        @staticmethod
        def config(folder_of_run: Path, **values: Any) -> Config:
            name = {"name": str(folder), **trains}
            own = {"method": "full", "lora": None} if method == "full" else {}
            config: Config = world.config("qwen3_vl", folder_of_run, **{**values, "model": name, **own})
            return config

    config = limited(
        Rows, tmp_path / "run", folder, compile="off", recompute="none", cuda_graphs="off",
        data={"name": "alike", "sources": sources},
    )  # fmt: skip
    peak_bytes, told = step_peak_bytes(config)
    print(method, *told.lines, sep="\n")
    assert told.starts("measured")
    # with adapters in the tower 6 % too much was planned on an H200
    assert_planned_within(config, peak_bytes, share=0.05 if frozen else 0.08)


class LowScores(Callback):
    """At each step, the gradient of 64 patches that see each other, all scores near -100, by torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.are_finite: list[bool] = []

    def on_step(self, record: StepRecord) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        make = partial(torch.randn, 1, 16, 64, 72, device="cuda", dtype=torch.bfloat16, generator=generator)
        query, key, value = make(), make(), make()
        query[..., 0], key[..., 0] = 29.0, -29.0
        query.requires_grad_(True)
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
        assert query.grad is not None
        self.are_finite.append(bool(query.grad.isfinite().all()))


def test_low_scores_have_finite_gradients_in_a_run(tiny, tmp_path):
    """A run turns torch's cuDNN attention off, whose gradients would be NaN, and leaves torch as it was."""
    scores, before = LowScores(), torch.backends.cuda.cudnn_sdp_enabled()
    config = tiny.config(tmp_path / "run", device="cuda", compile="off", batch={"samples_per_step": 2, "max_steps": 1})
    train(config, callbacks=[scores])
    assert scores.are_finite
    assert all(scores.are_finite)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_preference_training_is_within_5_percent(tiny, tmp_path, kind, recompute):
    """With passes for the reference, and KTO's before each step, at the sizes of training's."""
    rows = []
    for index in range(200):
        answers = [f"It is {index + k}. " * (20 + 7 * (index + 11 * k) % 40) for k in range(2)]
        row: dict[str, Any] = {"prompt": f"What is {index}? " * (index % 5 + 1)}
        row |= {"chosen": answers[0], "rejected": answers[1]} if kind == "dpo" else {}
        rows.append(row if kind == "dpo" else row | {"completion": answers[0], "label": index % 2 == 0})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(tiny, tmp_path / "model", **SHAPES["wide"])
    config = limited(
        tiny, tmp_path / "run", model, recompute=recompute, compile="off", objective=kind,
        data={"name": kind, "root": str(tmp_path), "sources": [{"path": str(tmp_path / "rows.jsonl")}]},
        batch={"samples_per_step": 50, "max_steps": 3, "micro_batch_tokens": None},
    )  # fmt: skip
    peak_bytes, told = step_peak_bytes(config)
    assert told.starts("measured")
    planned = assert_planned_within(config, peak_bytes)
    assert len(planned.plan.step(0).by_rank[0]) > 1


@pytest.mark.parametrize("kind", ["dpo", "simpo"])
def test_peaks_of_first_steps_are_not_those_of_the_reference(tiny, tmp_path, kind):
    """Where the reference's passes, before step 0, were those of longer pairs than the first steps'."""
    rows = [
        {"prompt": f"What is {i}?", "chosen": f"It is {i}. " * (30 + i), "rejected": "No. " * (30 + i)}
        for i in range(0, 96, 2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(tiny, tmp_path / "model", **SHAPES["wide"])
    config = tiny.config(
        tmp_path / "run", model={"name": str(model)}, device="cuda", compile="off", recompute="none", objective=kind,
        data={
            "name": "pairs", "root": str(tmp_path), "sources": [{"path": str(tmp_path / "rows.jsonl")}],
            "shuffle": False, "max_tokens": 1024,
        },
        batch={"samples_per_step": 8, "max_steps": 6, "micro_batch_tokens": 8192, "shuffle": False},
    )  # fmt: skip
    before = torch.cuda.memory_allocated()
    step_peak_bytes(config)
    lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    peaks = [line["peak_memory_bytes"] - before for line in lines if line["kind"] == "step"]
    # the fourth step's pass is planned to take half more than the second one's
    assert peaks[1] < 0.85 * peaks[3]
