"""The model of a run that stopped, from its checkpoint: the same as the one that its end would have exported."""

import shutil

import pytest
import torch

from flatout.errors import UsageError
from flatout.models.load.inference import load_trained, resolve_model_paths
from flatout.trainer.resume import load_stopped
from flatout.trainer.run import train

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "sections", [{"lora": {"rank": 4, "alpha": 8, "modules_to_save": ["norm"]}}, {"method": "full"}]
)
def test_it_answers_as_after_its_last_save(tiny, tmp_path, sections):
    config = tiny.config(tmp_path / "run", batch={"max_steps": 3}, optim={"lr": 5e-2}, **sections)
    train(config)
    final, tokenizer = load_trained(resolve_model_paths(str(config.folder)), device=CPU)
    shutil.rmtree(config.folder / "final")
    stopped, own, step = load_stopped(config.folder, CPU)
    assert step == 3
    ids = torch.arange(5, 25)[None]
    base, _ = load_trained(resolve_model_paths(str(tiny.model_dir)), device=CPU)
    with torch.no_grad():
        expected, found, before = (model(ids).logits for model in (final, stopped, base))
    assert torch.equal(found, expected)
    assert not torch.allclose(before, expected, atol=1e-2)
    chat = [{"role": "user", "content": "Hi"}]
    rendered = [one.apply_chat_template(chat, tokenize=False) for one in (tokenizer, own)]
    assert rendered[0] == rendered[1]
    assert stopped.generation_config.eos_token_id == final.generation_config.eos_token_id


def test_code_that_starts_adapters_is_not_run_to_answer(tiny, tmp_path):
    start = tmp_path / "start.py"
    start.write_text(
        "import torch\n\ndef ones(place, generator):\n    return torch.ones(place.num_rows, place.num_in)\n"
    )
    lora = {"rank": 4, "targets": ["q_proj"], "init_path": f"{start}:ones"}
    config = tiny.config(tmp_path / "run", batch={"max_steps": 1}, lora=lora)
    train(config)
    shutil.rmtree(config.folder / "final")
    start.write_text("raise SystemExit('it ran')\n")
    stopped, _, step = load_stopped(config.folder, CPU)
    assert step == 1
    assert stopped is not None


def test_what_cannot_be_told_without_an_end_is_refused(tiny, tmp_path):
    config = tiny.config(
        tmp_path / "run", method="full", batch={"max_steps": 1}, model={"init": "random", "name": str(tiny.model_dir)}
    )
    train(config)
    with pytest.raises(UsageError, match="a run with random weights answers only once it is; resume it: flatout train"):
        load_stopped(config.folder, CPU)
    shutil.rmtree(config.folder / "checkpoints")
    with pytest.raises(UsageError, match="no checkpoint yet; resume it: flatout train"):
        load_stopped(config.folder, CPU)
