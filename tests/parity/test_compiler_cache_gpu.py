"""On a CUDA GPU: compiled kernels land in the user's cache folder, and a second start of the command finds them."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 2}


def test_a_second_start_compiles_nothing_anew(tiny, tmp_path):
    model, temporary, cache = tmp_path / "model", tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    shape = Qwen3Config.from_pretrained(tiny.model_dir)
    shape.update(SHAPE)
    Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny.model_dir).save_pretrained(model)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR", "TRITON"))}
    env = {**kept, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache)}
    kernels = []
    for name in ("first", "second"):
        config = tiny.config(
            tmp_path / name, model={"name": str(model), "precision": "bf16"}, batch={"max_steps": 1}, device="cuda"
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(config.model_dump_json())
        done = subprocess.run(
            [sys.executable, "-m", "flatout", "train", str(path)], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "as one graph" in done.stdout, done.stdout
        assert "no current CUDA context" not in done.stderr
        assert not list(temporary.glob("torchinductor_*"))
        kernels.append({path.relative_to(cache) for path in cache.glob("flatout/compiler/**/*.cubin")})
    assert kernels[0], done.stdout
    assert kernels[0] == kernels[1]
