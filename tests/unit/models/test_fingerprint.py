"""A base model by its content: every file counts, and a large one is read again only when it changed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from flatout.config.schema import ModelConfig
from flatout.errors import CheckpointError
from flatout.io.durable_io import digest
from flatout.models.load.source import REMEMBERED_BYTES, cached_file_hash, fingerprint_model


def test_every_file_of_a_model_counts(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.model_dir, folder)
    model = ModelConfig(name=str(folder))
    whole = fingerprint_model(model)
    assert whole.keys() == {"config.json", "model.safetensors"}
    assert fingerprint_model(ModelConfig(name=str(tiny.model_dir))) == whole
    assert fingerprint_model(ModelConfig(name=str(folder), init="random")).keys() == {"config.json"}
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    assert fingerprint_model(model).keys() == {"config.json", "b.safetensors"}
    for content in ("[]", '{"weight_map": []}', '{"weight_map": {"x": 1}}', "{"):
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            fingerprint_model(model)


def test_a_model_of_the_hub_is_read_from_its_cache(tiny, tmp_path):
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny.model_dir, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    code = (
        "from flatout.config.schema import ModelConfig; from flatout.models.load.source import fingerprint_model;"
        "import json; print(json.dumps(fingerprint_model(ModelConfig(name='org/tiny'))))"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == fingerprint_model(ModelConfig(name=str(tiny.model_dir)))


def test_a_large_file_is_read_again_only_when_it_changed(tmp_path):
    path, memory = tmp_path / "large", tmp_path / "memory"
    with path.open("wb") as file:
        file.truncate(REMEMBERED_BYTES)
    facts = cached_file_hash(path, memory)
    assert facts == digest(path)
    (note,) = memory.iterdir()
    note.write_text(note.read_text().replace(facts.xxh3, "f" * 32))
    assert cached_file_hash(path, memory).xxh3 == "f" * 32  # it was not read
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.seek(12345)
        file.write(b"\x01")
    os.utime(path, ns=times)  # as a program does that copies times too
    assert cached_file_hash(path, memory) == digest(path)
    for content in ("", "[]", "{}", '{"stamp": 1}'):
        note.write_text(content)
        assert cached_file_hash(path, memory) == digest(path)


def test_without_a_place_to_remember_it_is_read_each_time(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(REMEMBERED_BYTES)
    (tmp_path / "memory").write_text("no folder")
    assert cached_file_hash(path, tmp_path / "memory") == digest(path)
