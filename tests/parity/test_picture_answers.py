"""Answers about pictures: as transformers' own `generate` writes them, from Python, the command line and a run."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_families import SOME_FAMILIES
from picture_world import MODES, SIZES, draw, make_picture_model, write_rows
from PIL import Image
from plain_pictures import plain_processor

from flatout.cli.main import main
from flatout.data.conversation import Origin
from flatout.data.prompt_file import Prompt, shown_prompt
from flatout.errors import UsageError

PICTURES = [draw(*size, seed, mode=MODES[seed % 3]) for seed, size in enumerate(SIZES)]
TEXTS = {"what is shown?": PICTURES[:1], "two <image> and <image>": PICTURES[1:3], "is it red?": []}
# no grouped product of experts in fp64; transformers' own generate fails
NOT_GENERATED = ("qwen3_vl_moe", "ovis2")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("picture_models")

    def make(family: str) -> Path:
        folder = root / family
        return folder if folder.is_dir() else make_picture_model(folder, family)

    return make


def asked(text: str, files: list[bytes]) -> Prompt:
    uris = [f"data:;base64,{base64.b64encode(file).decode()}" for file in files]
    return shown_prompt([{"role": "user", "content": text}], {"images": uris}, Origin("test", 1))


def plain_inputs(processor: Any, text: str, files: list[bytes]) -> dict[str, torch.Tensor]:
    """Return what transformers' whole model reads of one prompt alone."""
    before, *behind = (text if "<image>" in text else "<image>" * len(files) + text).split("<image>")
    parts = [{"type": "text", "text": before}] if before else []
    for piece in behind:
        parts += [{"type": "image"}, *([{"type": "text", "text": piece}] if piece else [])]
    turns = [{"role": "user", "content": parts}]
    written = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(file)) for file in files]
    given = dict(processor(text=[written], images=images or None, return_tensors="pt"))
    if not images:
        given.pop("mm_token_type_ids", None)
    return given


@pytest.mark.parametrize("family", [family for family in SOME_FAMILIES if family.values[0] not in NOT_GENERATED])
def test_answers_equal_those_of_generate(model_of, family):
    """Tokens and their log-probabilities. Several prompts share packed passes; one alone takes transformers' cache."""
    from transformers import AutoModelForImageTextToText

    from flatout.models.load.inference import load_trained, resolve_model_paths
    from flatout.models.pictures import PicturePacker
    from flatout.rollout.chat import processor_of_model, prompt_ids
    from flatout.rollout.in_process import InProcess
    from flatout.rollout.sampler import SamplingParams
    from flatout.rollout.sampler_model import make_sampler_model

    folder, told = model_of(family), list[str]()
    model, tokenizer = load_trained(resolve_model_paths(str(folder)), device=torch.device("cpu"))
    model.double()
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    processor, prompts, expected = plain_processor(folder), list[Any](), list[Any]()
    reader = processor_of_model(model, tokenizer)
    for text, files in TEXTS.items():
        prompt, given = asked(text, files), plain_inputs(processor, text, files)
        prompts.append(prompt_ids(model, tokenizer, prompt.messages, prompt.pictures))
        assert list(prompts[-1]) == given["input_ids"][0].tolist()
        found = plain.generate(
            **given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True, suppress_tokens=[reader.token_id],
        )  # fmt: skip
        answer = found.sequences[0, given["input_ids"].shape[1] :]
        logprobs = torch.cat(found.logits).log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        expected.append((tuple(answer.tolist()), logprobs.tolist()))
    sampler_model = replace(make_sampler_model(model, told.append), pictures=PicturePacker(reader, model))
    sampler = InProcess(sampler_model)
    with torch.no_grad():
        together = sampler.sample(prompts, 2, SamplingParams(8))
        alone = [sampler.sample([prompt], 1, SamplingParams(8)) for prompt in prompts]
        sampler.known.update({"slots": False, "own cache": False})
        recomputed = sampler.sample(prompts, 1, SamplingParams(8))
    assert not told
    for index, (token_ids, logprobs) in enumerate(expected):
        for found in (*together[index], *alone[index][0], *recomputed[index]):
            assert found.token_ids == token_ids
            # eager and sdpa compute softmax of towers in fp32
            assert found.logprobs == pytest.approx(logprobs, abs=2e-5)
    with torch.no_grad():
        other = asked("what is shown?", [draw(*SIZES[0], 99)])
        ids = prompt_ids(model, tokenizer, other.messages, other.pictures)
        ((changed,),) = sampler.sample([ids], 1, SamplingParams(8))
    assert ids == prompts[0]
    assert changed.logprobs != pytest.approx(expected[0][1], abs=1e-3)


def test_chat_eval_and_python_answer_about_pictures(model_of, tmp_path, capfd, monkeypatch):
    """The three ways give one answer; what is no picture is told before a model is loaded."""
    from flatout.api.run import Run

    write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run_dir: one\ndevice: cpu\nmodel: {{name: '{model_of('qwen2_5_vl')}', precision: fp32}}\n"
        "data: {name: pictures, root: data, sources: [{path: rows.jsonl}]}\nlora: {rank: 4, alpha: 8}\n"
        "eval: {fraction: 0.5, max_new_tokens: 6}\nbatch: {samples_per_step: 5, max_steps: 2}\n"
    )
    assert main(["train", str(config)]) == 0
    answers = [json.loads(line) for line in Path("one/answers.jsonl").read_text().splitlines()]
    assert len(answers[-1]["answers"]) == 3
    assert any("<image>" in answer["prompt"] for answer in answers[-1]["answers"])
    capfd.readouterr()
    run, options = Run("one"), {"max_new_tokens": 6, "temperature": 0.0}
    (said,) = run.generate("what is shown?", images=["pictures/0.png"], **options)
    parts = [{"type": "image", "image": Image.open("pictures/0.png")}, {"type": "text", "text": "what is shown?"}]
    assert run.generate([[{"role": "user", "content": parts}]], **options) == [said]
    both = run.generate(["what is shown?", "is it red?"], images=[[PICTURES[0]], None], **options)
    assert both[0] == said
    path, image = Path("pictures/0.png"), Image.open("pictures/0.png")
    for images in (str(path), path, path.read_bytes(), image, [path], (image,)):
        assert run.generate("what is shown?", images=images, **options) == [said]
        assert run.generate(["what is shown?"], images=images, **options) == [said]
    for of_each in ([path, None], [[path], []]):
        assert run.generate(["what is shown?", "is it red?"], images=of_each, **options) == both
    for images, count in ((path, 1), ([path], 1), ([path, path, path], 3)):
        with pytest.raises(UsageError, match=f"images: {count} given for 2 prompts; give each prompt a picture"):
            run.generate(["what is shown?", "is it red?"], images=images, **options)
    given = ["--prompt", "what is shown?", "--max-new-tokens", "6", "--temperature", "0", "--device", "cpu"]
    assert main(["chat", "one", "--image", "pictures/0.png", *given]) == 0
    assert capfd.readouterr().out.strip() == said
    rows = [
        {"prompt": "what is shown?", "images": ["pictures/0.png"], "answer": said},
        {"messages": [{"role": "user", "content": parts_of("pictures/1.png")}], "answer": "no such answer"},
        {"prompt": "is it red?", "answer": both[1]},
    ]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["eval", "one", "--answers", "asked.jsonl", "--max-new-tokens", "6", "--device", "cpu"]) == 0
    assert "exact match: 2 of 3 right" in capfd.readouterr().out
    Path("rows.txt").write_text("no picture")
    for options_of, code, says in (
        (["chat", "one", "--image", "rows.txt", *given], 3, "--image: images[0] ('rows.txt'): its file is text"),
        (["chat", "one", "--image", "nothing.png", *given], 3, "--image nothing.png: no such file"),
        (["chat", "one", "--image", "pictures/0.png", "--prompt", "<image> and <image>"], 3, "has 1 pictures"),
    ):
        assert main(options_of) == code
        assert says in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("missing", "code", "says"),
    [
        ("Pillow", 2, "needs the package PIL"),
        ("processor", 2, "has no image processor; copy preprocessor_config.json"),
        ("class", 3, "processor_class is 'NoSuchProcessor', which the installed transformers does not have"),
    ],
)
def test_texts_need_neither_pillow_nor_processor(model_of, tmp_path, capfd, monkeypatch, missing, code, says):
    folder = Path(shutil.copytree(model_of("qwen2_5_vl"), tmp_path / "model"))
    options = ["--max-new-tokens", "4", "--temperature", "0", "--device", "cpu", "--prompt", "is it red?"]
    picture = tmp_path / "a.png"
    picture.write_bytes(PICTURES[0])
    assert main(["chat", str(folder), *options]) == 0
    said = capfd.readouterr().out
    if missing == "Pillow":
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
    elif missing == "processor":
        (folder / "processor_config.json").unlink()
    else:
        (folder / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    assert main(["chat", str(folder), *options]) == 0
    assert capfd.readouterr().out == said
    monkeypatch.chdir(tmp_path)
    assert main(["chat", str(folder), "--image", "a.png", *options]) == code
    assert says in capfd.readouterr().err


def parts_of(path: str) -> list[dict[str, str]]:
    return [{"type": "image", "path": path}, {"type": "text", "text": "what is shown?"}]
