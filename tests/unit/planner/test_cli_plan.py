"""`flatout plan` end to end on the tiny model folder and its chats."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from flatout import load
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import UsageError
from flatout.planner.shape import check_positions
from flatout.trainer.model_shape import make_shape


@pytest.fixture
def run_file(tiny, tmp_path):
    """A run file on a copy of the model; all of its weights are 0 bytes long, so none can be read."""
    model_dir = tmp_path / "model"
    shutil.copytree(tiny.model_dir, model_dir)
    save_file({"none": torch.zeros(0)}, model_dir / "model.safetensors", {"format": "pt"})
    config = tiny.config(tmp_path / "run", model={"name": str(model_dir)}, batch={"max_steps": None})
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    return path


def shape_of(run_file: Path) -> dict:
    return json.loads((run_file.parent / "model" / "config.json").read_text())


def too_wide(text: str) -> list[str]:
    """Lines beyond 80 columns, but for a path on a line of its own, which is never broken."""
    return [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1]


def test_prints_the_plan(run_file, capsys):
    assert main(["plan", str(run_file), "batch.samples_per_step=16", "--ranks", "2", "--tokens-per-s", "50"]) == 0
    text = capsys.readouterr().out
    assert "steps             8\n" in text
    assert "120, 1 epoch\n" in text
    assert "balance, 2 ranks" in text
    assert "(this run)" in text
    assert "(estimate: weights" in text
    assert "time " in text
    assert too_wide(text) == []


def test_the_cpu_is_a_device_to_plan_for_and_an_unknown_one_is_refused(run_file, capsys):
    # whatever the file names
    assert main(["plan", str(run_file), "device=auto", "--device", "CPU"]) == 0
    assert "it trains on its CPU" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(run_file), "--device", "cpx"]) == 2
    assert "device 'cpx' is unknown; choose one of " in capsys.readouterr().err
    # which GPU is not known here
    assert main(["plan", str(run_file), "--device", "cuda"]) == 2
    assert "device 'cuda' is unknown; choose one of " in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_on_a_cpu_takes_about_what_is_planned(run_file, capsys, recompute):
    """Of a model whose tensors are large enough to count, in a process of its own."""
    shape = shape_of(run_file) | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    shape["layer_types"] = ["full_attention"] * 12
    (run_file.parent / "model" / "config.json").write_text(json.dumps(shape))
    words = [
        str(run_file),
        "model.init=random",
        "batch.samples_per_step=60",
        "batch.max_steps=2",
        f"recompute={recompute}",
    ]
    assert main(["plan", *words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]["total_bytes"]
    subprocess.run([sys.executable, "-m", "flatout", "train", *words, "checkpoint.every_steps=null"], check=True)
    steps = load(run_file.parent / "run").log.steps
    assert planned == pytest.approx(max(one.peak_memory_bytes for one in steps), rel=0.3)


def test_json_is_the_same_report(run_file, capsys):
    assert main(["plan", str(run_file), "eval.fraction=0.1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["num_samples"], values["num_held_out"], values["num_steps"]) == (108, 12, 18)
    assert values["num_label_tokens"] / values["num_tokens"] == values["label_share"]
    memory = values["memory"]
    assert memory["total_bytes"] == sum(value for key, value in memory.items() if key != "total_bytes")
    # 32 wide, 2 layers: embedding (tied), final norm, and for each layer q k v o, two head norms, MLP, two norms
    layer = 32 * (32 + 16 + 16 + 32) + 2 * 8 + 3 * 32 * 64 + 2 * 32
    assert memory["weights_bytes"] == 4 * (shape_of(run_file)["vocab_size"] * 32 + 32 + 2 * layer)


def test_a_named_gpu_gets_a_decision_and_its_longest_document(run_file, capsys):
    settings = ["batch.micro_batch_tokens=null", "--device", "4090"]
    assert main(["plan", str(run_file), *settings]) == 0
    text = capsys.readouterr().out
    assert "on RTX 4090" in text
    fits = re.fullmatch(r"fits +([\d.]+) GiB of ([\d.]+), ([\d.]+) to spare on RTX 4090", text.splitlines()[0])
    assert fits is not None
    assert float(fits[2]) == 21.5
    assert float(fits[1]) + float(fits[3]) == pytest.approx(21.5, abs=0.11)
    assert too_wide(text) == []
    assert "tokens per micro-batch, recompute none: 21.5 GiB of RTX 4090 hold" in " ".join(text.split())
    assert "longest document" in text
    assert main(["plan", str(run_file), *settings, "memory=0.3", "--json"]) == 0
    small = json.loads(capsys.readouterr().out)
    assert main(["plan", str(run_file), *settings, "--json"]) == 0
    large = json.loads(capsys.readouterr().out)
    # the tiny steps fit anywhere, so each is one micro-batch; the longest document is what memory decides
    assert large["num_micro_batches"] == large["num_steps"]
    assert large["micro_batch_tokens"] >= large["max_micro_batch_tokens"]
    assert large["memory"]["total_bytes"] <= large["memory_budget_bytes"]
    assert small["longest_document_tokens"] < large["longest_document_tokens"]
    assert main(["plan", str(run_file), "--device", "4091"]) == 2
    assert "device '4091' is unknown; choose one of b200, h200" in capsys.readouterr().err


def test_every_card_gets_a_line_without_a_gpu(run_file, capsys):
    settings = ["batch.micro_batch_tokens=null", "--device", "all"]
    assert main(["plan", str(run_file), *settings]) == 0
    text = capsys.readouterr().out
    assert too_wide(text) == []
    for name in ("RTX 4090", "A100 40GB", "A100 80GB", "L40S", "H100", "B200"):
        assert re.search(rf"^{name} +[\d,]+ tokens per micro-batch, recompute none:", text, re.MULTILINE)
    assert main(["plan", str(run_file), *settings, "memory=0.01", "--json"]) == 0
    assert all(
        text.startswith("cannot train: the longest sample") for text in json.loads(capsys.readouterr().out).values()
    )
    # what a card gets here is what it gets by name
    limit = ["batch.micro_batch_tokens=null", "batch.samples_per_step=120", "memory=0.2"]
    assert main(["plan", str(run_file), *limit, "--device", "all", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["RTX 4090"]
    assert main(["plan", str(run_file), *limit, "--device", "4090", "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert line.startswith(f"{named['micro_batch_tokens']:,} tokens per micro-batch, recompute {named['recompute']}:")
    assert f"{named['memory']['total_bytes'] / 2**30:.1f} of" in line
    assert main(["plan", str(run_file), *settings, "--ranks", "2"]) == 0
    assert re.search(r"^H100 +ddp, [\d,]+ tokens per micro-batch", capsys.readouterr().out, re.MULTILINE)
    assert main(["plan", str(run_file), *settings, "--step", "0"]) == 2
    assert "--step prints the micro-batches for one GPU" in capsys.readouterr().err


def test_every_card_is_planned_where_a_step_must_be_one_pass(tiny, tmp_path, capsys):
    batch = {"samples_per_step": 120, "micro_batch_tokens": None}
    one_pass = {"method": "full", "full": {"update": "backward"}, "optim": {"max_grad_norm": None}, "batch": batch}
    (tmp_path / "run.yaml").write_text(dump_config(tiny.config(tmp_path / "run", **one_pass)))
    assert main(["plan", str(tmp_path / "run.yaml"), "--device", "all"]) == 0
    assert "B200" in capsys.readouterr().out


def test_cards_without_float8_arithmetic_are_told(run_file, capsys):
    fp8 = [str(run_file), "base.storage=fp8", "batch.micro_batch_tokens=null"]
    assert main(["plan", *fp8, "--device", "all", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    without = {name for name, text in lines.items() if text.startswith("cannot train: base.storage: fp8 needs")}
    assert without == {"A100 80GB", "A100 40GB", "RTX 3090", "A10G", "T4"}
    assert main(["plan", *fp8, "--device", "3090"]) == 6
    assert "which RTX 3090 does not have; leave it out" in capsys.readouterr().err


def test_ranks_are_those_of_gpus(run_file, capsys):
    shared = [str(run_file), "context.parallel=2", "batch.micro_batch_tokens=null", "--device", "h100"]
    assert main(["plan", *shared]) == 2
    assert "must divide the number of ranks, which is 1 (gpus, or --ranks" in capsys.readouterr().err
    assert main(["plan", *shared, "gpus=[0,1]"]) == 0
    assert "2 ranks share each micro-batch" in capsys.readouterr().out
    assert main(["plan", *shared, "gpus=[0,1]", "--ranks", "4"]) == 2
    assert "--ranks is 4, but gpus names 2; leave one of them out" in capsys.readouterr().err


def test_one_step(run_file, capsys):
    assert main(["plan", str(run_file), "--ranks", "3", "--step", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 1, epoch 0: 6 samples")
    assert "rank 2:" in text
    assert too_wide(text) == []
    assert main(["plan", str(run_file), "--ranks", "3", "--step", "1", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["index"] == 1
    assert len(step["ranks"]) == 3
    assert sorted(i for rank in step["ranks"] for m in rank for i in m["sample_ids"]) == sorted(step["sample_ids"])


def edit_model(run_file: Path, **values) -> None:
    (run_file.parent / "model" / "config.json").write_text(json.dumps(shape_of(run_file) | values))


def test_samples_beyond_rotary_positions_are_told(run_file, capsys):
    edit_model(run_file, max_position_embeddings=100)
    assert main(["plan", str(run_file)]) == 0
    told = capsys.readouterr().out
    assert too_wide(told) == []
    assert re.search(r"positions +longest_sample \d+, max_position_embeddings 100", told)
    edit_model(run_file, max_position_embeddings=500)
    assert main(["plan", str(run_file)]) == 0
    assert "max_position_embeddings" not in capsys.readouterr().out


def test_samples_beyond_a_table_of_positions_are_refused(run_file, capsys):
    edit_model(run_file, max_position_embeddings=100, model_type="opt")
    assert main(["plan", str(run_file)]) == 2
    told = capsys.readouterr().err
    assert re.search(r"config\.json: the model has 100 positions, but the longest sample has \d+ tokens\n  try ", told)
    assert main(["train", str(run_file)]) == 2
    assert "the model has 100 positions" in capsys.readouterr().err


@pytest.mark.parametrize(("model_type", "refused"), [("gpt2", True), ("gptj", True), ("opt", True), ("llama", False)])
def test_transformers_ends_where_the_plan_says(model_type, refused):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    config = AutoConfig.for_model(
        model_type, **sizes, max_position_embeddings=16, rotary_dim=8, intermediate_size=64, ffn_dim=64,
        word_embed_proj_dim=32, bos_token_id=2, eos_token_id=3, pad_token_id=1, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises((IndexError, RuntimeError)) if refused else nullcontext():
        model(torch.arange(20)[None] + 4)
    with pytest.raises(UsageError) if refused else nullcontext():
        assert check_positions(make_shape(config.to_dict()), 20, origin="here")["max_position_embeddings"] == 16
    assert check_positions(make_shape(config.to_dict()), 16, origin="here") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--tokens-per-s", "0"], "--tokens-per-s is 0"),
        (["--tokens-per-s", "1e-300"], "--tokens-per-s is 1e-300"),
        (["--step", "20"], "--step is 20; expected 0 to 19"),
        (["--step", "-1"], "--step is -1"),
        (["batch.micro_batch_tokens=100"], "batch.micro_batch_tokens=100"),
    ],
)
def test_mistakes_exit_2_with_one_line(run_file, capsys, arguments, message):
    assert main(["plan", str(run_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 + error.count("\n  try ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        (json.dumps({"model_type": "qwen3", "num_hidden_layers": None}), "num_hidden_layers"),
    ],
)
def test_a_bad_model_folder_is_named(run_file, capsys, content, message):
    file = run_file.parent / "model" / "config.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert main(["plan", str(run_file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "model" in error
