"""Runs on rows with pictures: ranks, resuming, full fine-tuning, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_world import make_picture_model, write_rows
from PIL import ImageOps
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PaliGemmaConfig

from flatout.cli.main import main
from flatout.config.schema import ModelConfig
from flatout.data.pictures.processor import PictureProcessor
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import PackingError, UsageError
from flatout.models.load.model import load_model
from flatout.models.pictures import check_pictures, read_with_own_attention, require_picture_model
from flatout.track.run_log import read_run
from flatout.trainer.picture_inputs import PictureMaker
from tests.usual import usual


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("picture_runs")
    write_rows(root)
    make_picture_model(root / "model", "qwen2_5_vl")
    return root


def write_config(world: Path, folder: Path, more: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"run_dir: {folder / 'one'}\ndevice: cpu\nmodel: {{name: '{world / 'model'}', precision: fp64}}\n"
        f"data: {{name: pictures, root: '{world / 'data'}', sources: [{{path: '{world / 'rows.jsonl'}'}}]}}\n"
        f"lora: {{rank: 4, alpha: 8}}\neval: {{fraction: 0.2, prompts: []}}\n"
        "batch: {samples_per_step: 5, max_steps: 3, micro_batch_tokens: 120}\n" + more
    )
    return path


def test_the_report_shows_pictures(world, tmp_path, metrics_of):
    """Small copies beside the highest losses, and the answers: prompts of one text have an entry for each picture.

    What is recorded of a prompt is what the sampler reads.
    """
    config = write_config(world, tmp_path)
    config.write_text(config.read_text().replace("prompts: []", "max_new_tokens: 2"))
    part, asked = {"type": "text", "text": "what is shown?"}, []
    for number in (0, 1, None):
        image = [] if number is None else [{"type": "image", "path": str(world / "pictures" / f"{number}.png")}]
        asked.append({"messages": [{"role": "user", "content": [*image, part]}]})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    words = [str(config), f"eval.prompts={tmp_path / 'questions.jsonl'}", "eval.every_steps=1"]
    assert main(["train", *words, "batch.max_steps=2", "checkpoint.every_steps=1"]) == 0
    run, old = tmp_path / "one", tmp_path / "old"
    # what reads pictures again goes with the adapter
    names = [folder / "processor_config.json" for folder in (run / "final", world / "model")]
    assert names[0].read_bytes() == names[1].read_bytes()
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "step-2")
    assert main(["train", *words, "batch.max_steps=2", "checkpoint.every_steps=1"]) == 0
    copies = {line["id"]: line["copy"] for line in lines_of(run / "pictures.jsonl")}
    assert len(copies) == len(lines_of(run / "pictures.jsonl"))  # each once, over four evaluations of two starts
    assert all(copy.startswith("data:image/jpeg;base64,") for copy in copies.values())
    worst, answers = metrics_of(run, "eval"), lines_of(run / "answers.jsonl")
    assert [[len(one["pictures"]) for one in line["answers"]] for line in answers] == [[1, 1, 0]] * 4
    recorded = [one for line in worst for one in line["worst"]] + [one for line in answers for one in line["answers"]]
    assert {name for one in recorded for name in one["pictures"]} == copies.keys()
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(
        copy in page
        for one in (*worst[-1]["worst"], *answers[-1]["answers"])
        for copy in map(copies.get, one["pictures"])
    )
    assert page.count('<div class="answer">') == 3
    # records of earlier versions hold the copies themselves
    shutil.copytree(run, old)
    (old / "pictures.jsonl").unlink()
    for name in ("metrics.jsonl", "answers.jsonl"):
        text = (run / name).read_text()
        (old / name).write_text(re.sub("|".join(copies), lambda name: copies[name[0]], text))
    ours, theirs = read_run(run), read_run(old)
    assert (ours.evals, ours.answers, ours.num_bad_lines) == (theirs.evals, theirs.answers, 0)
    assert ours.answers[-1].answers[0].pictures[0] == copies[answers[-1]["answers"][0]["pictures"][0]]
    # one that is lost is left out
    (run / "pictures.jsonl").write_text("")
    assert [one.pictures for one in read_run(run).answers[-1].answers] == [(), (), ()]


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_full_fine_tuning_trains_the_decoder_of_texts_alone(world, tmp_path):
    config = write_config(world, tmp_path, "method: full\n")
    config.write_text(config.read_text().replace("lora: {rank: 4, alpha: 8}\n", ""))
    assert main(["train", str(config)]) == 0
    before, after = load_file(world / "model" / "model.safetensors"), tmp_path / "one" / "final" / "model.safetensors"
    changed = {name for name, value in load_file(after).items() if not torch.equal(value.float(), before[name].float())}
    assert changed
    assert not any("visual" in name for name in changed)


def test_a_run_does_not_go_on_with_other_pictures(world, tmp_path, capfd):
    for name in ("rows.jsonl", "pictures"):
        (shutil.copytree if name == "pictures" else shutil.copy)(world / name, tmp_path / name)
    config = write_config(world, tmp_path, "checkpoint: {every_steps: 1}\n")
    config.write_text(
        config.read_text()
        .replace(str(world / "rows"), str(tmp_path / "rows"))
        .replace(str(world / "data"), str(tmp_path / "data"))
    )
    assert main(["train", str(config), "batch.max_steps=2"]) == 0
    (tmp_path / "pictures" / "0.png").write_bytes((tmp_path / "pictures" / "2.png").read_bytes())
    assert main(["train", str(config), "batch.max_steps=2"]) == 0  # the set holds the pictures that it was built from
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / "one" / "final")
    assert main(["train", str(config), "batch.max_steps=2"]) == 4
    assert "data" in "".join(capfd.readouterr())


# settings of both runs, and those of the one over ranks
SHARDED = {
    "fsdp": ([], ["strategy=fsdp"]),
    "ddp": ([], ["strategy=ddp"]),
    "zero1": ([], ["strategy=zero1"]),
    "zero2": ([], ["strategy=zero2"]),
    "full zero3": (["method=full"], ["strategy=zero3"]),
    "full offload": (["method=full"], ["strategy=zero3", "sharding.offload=true"]),
    "nf4": (["base.storage=nf4", "model.precision=fp32"], ["strategy=fsdp"]),
    "fp8": (["base.storage=fp8", "model.precision=fp32"], ["strategy=fsdp"]),
}


@pytest.mark.exhaustive  # test_tower_runs.py has ranks with the suite
@pytest.mark.parametrize("case", SHARDED)
def test_ranks_take_the_steps_of_one_process(world, tmp_path, metrics_of, case):
    both, sharded = SHARDED[case]
    path = write_config(world, tmp_path)
    if "method=full" in both:
        path.write_text(path.read_text().replace("lora: {rank: 4, alpha: 8}\n", ""))
    assert main(["train", str(path), *both]) == 0
    assert main(["train", str(path), *both, f"run_dir={tmp_path / 'two'}", "gpus=[0,1]", *sharded]) == 0
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "eval_loss")):
        one, two = ([record[name] for record in metrics_of(tmp_path / run, kind)] for run in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-5 if "base" in "".join(both) else 1e-12)


REFUSED = {
    "deepspeed": (
        ["train", "gpus=[0,1]", "strategy=deepspeed", "model.precision=fp32"],
        "cannot be trained with strategy=deepspeed yet",
    ),
    "context": (["train", "gpus=[0,1]", "context.parallel=2"], "cannot be trained with context.parallel=2 yet"),
    "prefixes": (["train", "batch.share_prefix=on"], "samples hold pictures"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_built_is_refused_by_name(world, tmp_path, capfd, what):
    if what == "deepspeed":
        pytest.importorskip("deepspeed")
    (verb, *options), says = REFUSED[what]
    assert main([verb, str(write_config(world, tmp_path)), *options]) == 2
    assert says in " ".join("".join(capfd.readouterr()).split())


@pytest.mark.parametrize(("method", "ranks"), usual([("lora", 1), ("full", 1), ("lora", 2)], [("lora", 1)]))
def test_verify_compares_a_step_with_pictures(world, tmp_path, monkeypatch, capfd, method, ranks):
    path = write_config(world, tmp_path)
    if method == "full":
        path.write_text(path.read_text().replace("lora: {rank: 4, alpha: 8}", "method: full"))
    config = ["verify", str(path), "--fp64", "--ranks", str(ranks)]
    assert main(config) == 0
    assert ("ddp" in capfd.readouterr().out) == (ranks > 1)
    rows = json.loads((tmp_path / "one" / "verify.json").read_text())["rows"]
    assert max(row["worst_difference"] for row in rows if row["case"].startswith("packed")) < 1e-6
    # the reference does not read what training does
    own = PictureMaker.with_values

    def darker(self: Any, batch: Any, values: Any, *rest: Any) -> Any:
        return own(self, batch, {**values, "pixel_values": values["pixel_values"] / 2}, *rest)

    monkeypatch.setattr(PictureMaker, "with_values", darker)
    monkeypatch.setattr("flatout.trainer.load.check_pictures", lambda *_: "not checked")
    assert main(config) == 5
    assert "FAIL" in capfd.readouterr().out


def test_rounds_refuse_prompts_with_pictures_by_row_and_take_those_without(world, tmp_path, capfd):
    path, rows = tmp_path / "rounds.yaml", tmp_path / "rows.jsonl"
    path.write_text(
        f"{{device: cpu, model: {{name: '{world / 'model'}'}}, data: ['{rows}'], objective: grpo,"
        "rollout: {rounds: 1, prompts: 2, max_new_tokens: 4, rewards: [{kind: length, max_tokens: 3}]}}"
    )
    rows.write_text(text := '{"prompt": "what is shown"}\n')
    assert main(["plan", str(path)]) == 0
    rows.write_text(text + json.dumps({"prompt": "what is", "image": str(world / "pictures" / "0.png")}))
    assert main(["plan", str(path)]) == 3
    assert f"{rows}:2: has a picture" in capfd.readouterr().err


def test_pictures_that_are_read_in_both_directions_are_padded(world, tmp_path, monkeypatch, capfd):
    model = make_picture_model(tmp_path / "gemma3", "gemma3")
    path = write_config(world, tmp_path)
    path.write_text(path.read_text().replace(str(world / "model"), str(model)))
    config = [str(path), "data.name=gemma3"]
    for setting, says in {
        "batch.layout=packed": "it attends in both directions inside a picture",
        "model.attention=sdpa": "reads pictures both ways try model.attention=auto",
    }.items():
        assert main(["train", *config, setting]) == 2
        assert says in " ".join(capfd.readouterr().err.split())
    assert main(["verify", *config, "--fp64", "--ranks", "1"]) == 0
    assert main(["train", *config]) == 0
    assert "pictures: padded = alone" in capfd.readouterr().out
    monkeypatch.setattr("flatout.models.blocks.picture_kinds", lambda config: None)
    assert main(["train", *config, f"run_dir={tmp_path / 'causal'}"]) == 2
    assert "padded documents with pictures differ from those of single documents" in " ".join(
        capfd.readouterr().err.split()
    )


def test_a_prompt_that_is_read_in_both_directions_is_refused():
    text = {"model_type": "gemma", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(PaliGemmaConfig(text_config=text))
    with pytest.raises(UsageError, match="model type paligemma attends in both directions in more than pictures"):
        require_picture_model(model, model.config.image_token_id)


BUGS = ["order of pictures", "neighbour's positions", "another picture's features", "one axis", "a picture more"]


def test_the_check_at_start_up_finds_planted_bugs(world):
    model_dir = str(world / "model")
    config = ModelConfig(name=model_dir, precision="fp64")
    loaded = load_model(config, method="lora", device=torch.device("cpu"), seed=0)
    read_with_own_attention(loaded.model, loaded.dtype)
    maker = PictureMaker(PictureProcessor(model_dir, load_tokenizer(model_dir)), loaded.model)

    def planted(bug: str, batch: Any, images: Any, counts: Any, token_ids: Any) -> Any:
        made = maker.with_images(batch, images, counts, token_ids)
        if bug == "order of pictures":
            return replace(made, pictures=maker.with_images(batch, images[::-1], counts[::-1], token_ids).pictures)
        if bug == "neighbour's positions":
            return replace(made, axes=made.axes.roll(1, 1))
        if bug == "another picture's features":
            other = maker.with_images(batch, [ImageOps.invert(image) for image in images], counts, token_ids)
            return replace(made, pictures=other.pictures)
        if bug == "one axis":
            return replace(made, axes=made.axes[:1].expand(3, -1))
        return replace(made, pictures={name: torch.cat([one, one[:4]]) for name, one in made.pictures.items()})

    documents = maker.probes(0), maker.probes(1)
    assert "no leak" in check_pictures(loaded, *documents, maker.with_images)
    for bug in BUGS:
        with pytest.raises(PackingError, match="model type qwen2_5_vl"):
            check_pictures(loaded, *documents, partial(planted, bug))
    maker.close()
