"""A model over several devices: the file is checked before weights are read, and the answer is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from flatout.cli.main import main
from flatout.errors import UsageError
from flatout.models.load.inference import describe_devices, load_trained, read_device_map, resolve_model_paths

WHOLE = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
BY_LAYER = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 0}


def write(folder: Path, content: Any) -> str:
    path = folder / "map.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.fixture(scope="module")
def trained_run(tiny, tmp_path_factory):
    from flatout.trainer.run import train

    return train(tiny.config(tmp_path_factory.mktemp("chat") / "run", batch={"max_steps": 2})).folder


def test_an_adapter_on_a_mapped_model_answers_as_on_one_device(trained_run, tmp_path, capsys):
    answers = []
    for options in ([], ["--device-map", write(tmp_path, WHOLE)], ["--device-map", write(tmp_path, {"": "cpu"})]):
        drawn = ["--prompt", "Hello", "--max-new-tokens", "8", "--temperature", "1", "--seed", "3"]
        assert main(["chat", str(trained_run), *drawn, *options]) == 0
        told = capsys.readouterr()
        answers.append(told.out)
        assert ("cpu: " in told.err) == bool(options)
    assert answers[0].strip()
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model.layer.0": "cpu"}, r"'model.layer.0' is not a module .* look like model\.layers\.0"),
        ({"model.layers.0.mlp": "cpu"}, "part of a decoder layer; map whole layers"),
        ({"model": "disk"}, "'disk'; expected cpu, a GPU's index, or cuda:INDEX"),
        ({"model": True}, "True; expected cpu"),
        ({"model": "cuda:77"}, "GPU 77, but [0-9]+ are visible"),
        ({"model.layers": "cpu"}, r"no entry covers model\.embed_tokens\.weight \(2 weights"),
        ([], "must be an object"),
        ({}, "must be an object"),
        ("{", "not readable as JSON"),
    ],
)
def test_a_wrong_file_is_told_before_weights_are_read(tiny, tmp_path, content, told):
    with pytest.raises(UsageError, match=told):
        read_device_map(write(tmp_path, content), AutoConfig.from_pretrained(tiny.model_dir))


def test_a_name_that_is_neither_a_file_nor_a_map_is_told(tiny):
    with pytest.raises(UsageError, match="nor one of auto, balanced, sequential"):
        read_device_map("balancd", AutoConfig.from_pretrained(tiny.model_dir))


def test_a_device_and_a_map_together_are_refused(trained_run, capsys):
    assert main(["chat", str(trained_run), "--device", "cpu", "--device-map", "auto", "--prompt", "x"]) == 2
    assert "keep one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["device_map", "model.device_map"])
def test_training_names_the_strategy_to_use_instead(tiny, tmp_path, name):
    with pytest.raises(UsageError, match=rf"{name}: .*training does not spread a model"):
        tiny.config(tmp_path, f"{name}=auto")


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential", "file"])
def test_over_two_gpus_the_logits_are_those_of_one(trained_run, tmp_path, device_map):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    wanted = write(tmp_path, BY_LAYER) if device_map == "file" else device_map
    trained, tokens = resolve_model_paths(str(trained_run)), torch.arange(3, 40)[None].cuda()
    alone, _ = load_trained(trained, device=torch.device("cuda", 0))
    spread, _ = load_trained(trained, device=torch.device("cuda", 0), device_map=wanted)
    with torch.inference_mode():
        expected, got = alone(tokens).logits, spread(tokens).logits
    torch.testing.assert_close(got.to(expected.device), expected, rtol=1e-4, atol=1e-5)
    if device_map == "file":
        assert describe_devices(spread) == "cuda:0: 3 modules, cuda:1: 2 modules"
    assert main(["chat", str(trained_run), "--prompt", "Hello", "--max-new-tokens", "4", "--device-map", wanted]) == 0
