"""Facts are found again under an equal key only, and damage is told."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.errors import ResourceError
from flatout.io.kept_facts import PACKAGE, find_facts, hashes_of, keep_facts

KEY = {"flatout": "1", "device": ["cuda", 9, 0], "settings": {"rank": 16, "dropout": 0.0}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flatout" / "checks"


def test_facts_are_found_under_an_equal_key_and_kind_only():
    assert find_facts("self-test", KEY) is None
    keep_facts("self-test", KEY, {"line": "exact"})
    for equal in (KEY, dict(reversed(KEY.items()))):
        found = find_facts("self-test", equal)
        assert found is not None
        assert found.facts == {"line": "exact"}
    assert find_facts("compiled layers", KEY) is None
    for changed in (
        {"flatout": "2"},
        {"device": ["cuda", 9, 1]},
        {"settings": {"rank": 16, "dropout": 0.1}},
        {"new": 1},
    ):
        assert find_facts("self-test", {**KEY, **changed}) is None


def test_the_folder_is_private(cache):
    keep_facts("self-test", KEY, {})
    assert cache.stat().st_mode & 0o777 == 0o700


def fact_file(cache: Path) -> Path:
    keep_facts("self-test", KEY, {"line": "exact"})
    (file,) = cache.glob("*.json")
    return file


@pytest.mark.parametrize("who", ["folder of another", "file of another", "open to all", "link of another", "own"])
def test_only_what_this_user_has_written_is_believed(cache, who, monkeypatch):
    file = fact_file(cache)
    if os.geteuid() != 0 and "another" in who:
        pytest.skip("only root can give files away")
    if who == "folder of another":
        os.chown(cache, 12345, -1)
    elif who == "file of another":
        os.chown(file, 12345, -1)
    elif who == "link of another":
        cache.rename(cache.with_name("moved"))
        cache.symlink_to("moved")
        os.chown(cache, 12345, -1, follow_symlinks=False)
    elif who == "open to all":
        cache.chmod(0o777)
    if who == "own":
        assert find_facts("self-test", KEY) is not None
        return
    told: list[str] = []
    assert find_facts("self-test", KEY, told.append) is None
    assert re.search("is not believed: .*(belongs to user|other users can write)", told.pop())
    if who == "open to all":
        # what others may have put there goes with the next fact that is kept
        (cache / "forged.json").write_text("{}")
        keep_facts("self-test", KEY, {"line": "exact"})
        assert [path.name for path in cache.iterdir()] == [file.name]
        assert cache.stat().st_mode & 0o777 == 0o700
        assert find_facts("self-test", KEY) is not None
    if who == "folder of another":
        keep_facts("self-test", KEY, {"line": "exact"}, told.append)
        assert "belongs to user 12345" in told.pop()


def test_a_forged_hash_of_a_large_file_is_not_believed(tmp_path, monkeypatch):
    from flatout.models.load import source

    monkeypatch.setattr(source, "REMEMBERED_BYTES", 1)
    weights, memory = tmp_path / "model.safetensors", tmp_path / "digests"
    weights.write_bytes(b"weights")
    true = source.cached_file_hash(weights, memory)
    (note,) = memory.iterdir()
    kept = json.loads(note.read_text())
    note.write_text(json.dumps({**kept, "xxh3": "0" * 32}))
    assert source.cached_file_hash(weights, memory).xxh3 == "0" * 32  # the note counts: it is this user's
    memory.chmod(0o777)
    assert source.cached_file_hash(weights, memory) == true


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("exact", "other"),
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"exact"', "NaN"),
        lambda text: "[]",
        lambda text: "",
    ],
)
def test_damage_is_told_with_the_file(cache, damage):
    keep_facts("self-test", KEY, {"line": "exact"})
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    told: list[str] = []
    assert find_facts("self-test", KEY, told.append) is None
    assert re.search(r"self-test-.*\.json.*; this record is ignored", *told)


def test_the_facts_of_another_key_in_the_place_of_this_one_do_not_count(cache):
    keep_facts("self-test", KEY, {"line": "mine"})
    (mine,) = cache.iterdir()
    keep_facts("self-test", {**KEY, "flatout": "2"}, {"line": "another's"})
    (other,) = set(cache.iterdir()) - {mine}
    other.replace(mine)
    assert find_facts("self-test", KEY) is None


def test_nan_is_not_kept():
    with pytest.raises(ValueError, match="not JSON compliant"):
        keep_facts("compiled layers", KEY, {"smallest_cosine": float("nan")})


def test_a_folder_that_cannot_be_written_is_told(cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    told: list[str] = []
    keep_facts("self-test", KEY, {}, told.append)
    assert re.search("checks.*; the next start finds this out again", *told)


def identity_of(package: Path, **env: str) -> dict[str, str]:
    """What a process that imports flatout from this folder says of its code and packages."""
    code = "import json\nfrom flatout.io.kept_facts import code_identity\nprint(json.dumps(dict(code_identity())))"
    env = {**os.environ, "PYTHONPATH": str(package.parent), **env}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_changed_line_of_flatout_or_another_package_changes_the_identity(tmp_path):
    package = tmp_path / "src" / "flatout"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = identity_of(package)
    assert identity_of(package) == before
    with (package / "models" / "packed.py").open("a") as file:
        file.write("# changed\n")
    changed = identity_of(package)
    assert changed["flatout"] != before["flatout"]
    assert changed["packages"] == before["packages"]
    # what a checkout is installed as is seen only by processes that look into its folder
    (package.parent / "flatout.egg-info").mkdir()
    assert identity_of(package) == changed
    site = tmp_path / "site"
    (site / "kernels-1.0.dist-info").mkdir(parents=True)
    installed = identity_of(package, PYTHONPATH=f"{package.parent}:{site}")
    assert installed["flatout"] == changed["flatout"]
    assert installed["packages"] != changed["packages"]
    (site / "kernels-1.0.dist-info").rename(site / "kernels-1.1.dist-info")
    assert identity_of(package, PYTHONPATH=f"{package.parent}:{site}")["packages"] != installed["packages"]


def test_hashes_are_of_the_content(tmp_path):
    file = tmp_path / "modeling.py"
    file.write_text("a")
    before = hashes_of({"modeling": file})
    file.write_text("b")
    assert hashes_of({"modeling": file}) != before
    with pytest.raises(ResourceError, match="gone"):
        hashes_of({"gone": tmp_path / "gone"})
