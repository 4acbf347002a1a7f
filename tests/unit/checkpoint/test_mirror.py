"""Checkpoints in an object store: sent beside training, kept as on the disk, and resumed from once the disk is lost."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from run_folders import require_equal, state_of
from safetensors.torch import load_file
from spawned_ranks import start_warm_ranks
from store_stand_in import store_stand_in
from usual import usual
from warm_process import WarmProcess

from flatout.checkpoint.manifest import encode_manifest
from flatout.checkpoint.mirror import MirrorManifest
from flatout.cli.main import main
from flatout.config.read import dump_config
from flatout.errors import CheckpointError, ResourceError, UsageError
from flatout.io.durable_io import FileFacts
from flatout.track.callback import Callback
from flatout.track.run_log import read_run
from flatout.trainer.run import train

MIRROR = "s3://bucket/runs/one"


@pytest.fixture
def store(monkeypatch):
    with store_stand_in() as files:
        monkeypatch.setenv("AWS_ENDPOINT_URL", files.address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "WHEN_REQUIRED")  # what the stand-in reads
        yield files


def config_of(tiny, folder, num_steps=4, mirror=MIRROR, **more):
    checkpoint = {"every_steps": 1, "mirror": mirror, **more.pop("checkpoint", {})}
    batch = {"max_steps": num_steps, "samples_per_step": 4}
    return tiny.config(folder, method="full", batch=batch, checkpoint=checkpoint, **more)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The state of a run without a mirror, by its number of steps."""
    states = {}

    def state(num_steps=4):
        if num_steps not in states:
            folder = tmp_path_factory.mktemp("whole") / "run"
            train(config_of(tiny, folder, num_steps, mirror=None))
            states[num_steps] = state_of(folder, num_steps)
        return states[num_steps]

    return state


def manifests(store, mirror="runs/one"):
    """What the manifests of a mirror say that are whole, the newest last."""
    found = []
    for name, content in list(store.objects.items()):
        if name.startswith(f"bucket/{mirror}/step-"):
            with suppress(ValueError):
                found.append((int(name.split(".")[1]), json.loads(content)))
    return [one for _, one in sorted(found, key=lambda pair: (pair[1]["step"], pair[0]))]


class Paced(Callback):
    """Lets the store have each checkpoint before the next step."""

    def __init__(self, store):
        self._store = store

    def on_save(self, step, folder):
        while not any(one["step"] == step for one in manifests(self._store)):
            time.sleep(0.002)


def events(folder, kind):
    return [event for event in read_run(folder).events if event["kind"] == kind]


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_machine_that_is_lost_at_any_moment_costs_no_bit(num_kills, tiny, tmp_path, store, whole):
    """SIGKILL while checkpoints are sent; the next machine has nothing but the command."""
    num_steps, draw, struck = 4 + 2 * num_kills, random.Random(5), 0
    config = config_of(tiny, tmp_path / "run", num_steps)
    (file := tmp_path / "run.yaml").write_text(dump_config(config))
    for life in range(num_kills):
        store.write_s = 0.01
        before = max((one["step"] for one in manifests(store)), default=0)
        process = WarmProcess(["-m", "flatout", "train", str(file)], os.environ, tmp_path / f"{life}.log")
        while process.poll() is None:
            if store.parts and max((one["step"] for one in manifests(store)), default=0) > before:
                # however slow this process is, the upload that it has seen is not over before the kill
                store.write_s = 1.0
                time.sleep(draw.random() * 0.05)
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        assert process.wait(60) in (0, -signal.SIGKILL), (tmp_path / f"{life}.log").read_text()
        shutil.rmtree(config.folder)
        struck += bool(store.parts)
        store.parts.clear()
    assert struck >= num_kills // 2, "a kill that strikes no upload proves little"
    store.write_s = 0.0
    train(config)
    require_equal(state_of(config.folder, num_steps), whole(num_steps))
    assert events(config.folder, "resumed")
    assert [record.step for record in read_run(config.folder).steps] == [*range(1, num_steps + 1)], "its figures, too"
    shutil.rmtree(config.folder)
    train(config)
    require_equal(state_of(config.folder, num_steps), whole(num_steps))
    assert (config.folder / "final" / "model.safetensors").exists(), "results, too"


def test_results_are_sent_with_the_last_checkpoint_alone(tiny, tmp_path, store):
    """A store so slow that the run is complete while its first checkpoint is being sent."""
    store.write_s = 0.1
    train(config_of(tiny, tmp_path / "run", 4, checkpoint={"keep": 10}))
    has_results = {one["step"]: any(name.startswith("final/") for name in one["files"]) for one in manifests(store)}
    assert has_results.pop(4)
    assert has_results
    assert not any(has_results.values())


def test_the_mirror_keeps_what_the_disk_keeps(tiny, tmp_path, store):
    evaluation = {"fraction": 0.2, "every_steps": 1, "min_delta": 100.0}  # the first one stays the best
    config = config_of(tiny, tmp_path / "run", 5, checkpoint={"keep": 1}, eval=evaluation)
    train(config, callbacks=[Paced(store)])
    kept = sorted(int(path.name[5:]) for path in (config.folder / "checkpoints").iterdir())
    assert [one["step"] for one in manifests(store)] == kept
    named = {facts["xxh3"] for one in manifests(store) for facts in one["files"].values()}
    assert {name.rpartition("/")[2] for name in store.objects if "/files/" in name} == named
    sent = [
        call[1] for call in store.calls if call[0] == "POST" and "/files/" in call[1] and call[1].endswith("uploads")
    ]
    assert len(sent) == len(set(sent)), "what is there is not sent again"
    best = state_of(config.folder, kept[0])
    shutil.rmtree(config.folder)
    train(config)
    require_equal(state_of(config.folder, kept[0]), best)


class Failing(Callback):
    """Makes the store refuse files once the run has started."""

    def __init__(self, store):
        self._store = store

    def on_start(self, start):
        self._store.fails["files/"] = [403] * 99


def test_a_store_that_fails_costs_no_step_and_is_told_at_the_end(tiny, tmp_path, store, whole):
    config = config_of(tiny, tmp_path / "run")
    with pytest.raises(ResourceError, match=r"has its last checkpoint, but its mirror does not: .*AWS_ACCESS_KEY_ID"):
        train(config, callbacks=[Failing(store)])
    require_equal(state_of(config.folder, 4), whole())
    assert (config.folder / "final").is_dir()
    assert events(config.folder, "not_mirrored")
    assert not manifests(store)
    store.fails = {"files/": [503, 500]}
    train(config)
    assert manifests(store)[-1]["step"] == 4
    said = [event["why"] for event in events(config.folder, "mirror")]
    assert any("(503); asking again" in line for line in said)
    assert "hidden-secret" not in (config.folder / "events.jsonl").read_text()


@pytest.mark.exhaustive
def test_a_restart_with_checkpoints_here_survives_a_store_that_is_gone(tiny, tmp_path, store, whole):
    config = config_of(tiny, tmp_path / "run")
    train(config)
    for name in ("final", "checkpoints/step-4"):
        shutil.rmtree(config.folder / name)
    store.fails["probe"] = [403]
    store.fails["step-"] = [403]
    train(config)
    assert any("training goes on from" in event["why"] for event in events(config.folder, "not_mirrored"))
    require_equal(state_of(config.folder, 4), whole())


@pytest.mark.parametrize(
    ("mirror", "fails", "error", "said"),
    [
        ("s3://nowhere/run", {}, ResourceError, "s3://nowhere/run: nothing is there; check the address"),
        (MIRROR, {"probe": [403]}, ResourceError, "access is denied .403.; set AWS_PROFILE"),
        ("az://bucket/run", {}, UsageError, "adlfs"),
        ("nothing://bucket/run", {}, UsageError, "Protocol not known: nothing; use s3://"),
    ],
)
def test_a_mirror_that_cannot_be_written_to_is_found_before_the_first_step(
    mirror, fails, error, said, tiny, tmp_path, store
):
    store.fails = fails
    config = config_of(tiny, tmp_path / "run", mirror=mirror)
    with pytest.raises(error, match=said):
        train(config)
    assert not read_run(config.folder).steps


@pytest.mark.parametrize("mirror", ["s3://me:hidden@bucket/run", "https://host/run", "folder", "az://c/run?sig=hidden"])
def test_what_is_no_address_to_write_to_is_refused_by_its_setting(mirror, tiny, tmp_path):
    with pytest.raises(
        UsageError, match=r"checkpoint\.mirror: expected an address to write to, without a password"
    ) as refused:
        config_of(tiny, tmp_path / "run", mirror=mirror)
    assert "hidden" not in str(refused.value)


def spoil(store, manifest, how):
    """Damage the weights of a manifest's checkpoint, or the manifest."""
    facts = manifest["files"][f"checkpoints/step-{manifest['step']}/model.safetensors"]
    name = f"bucket/runs/one/files/{facts['xxh3']}"
    own = next(name for name, content in store.objects.items() if "/step-" in name and json.loads(content) == manifest)
    if how == "missing":
        del store.objects[name]
    elif how == "damaged":
        store.objects[name] = store.objects[name][:-1] + b"\0"
    elif how == "cut":
        store.objects[own] = store.objects[own][:-20]
    else:
        files = {path: FileFacts(**facts) for path, facts in manifest["files"].items()}
        files = {how if path.endswith("model.safetensors") else path: facts for path, facts in files.items()}
        facts = {key: value for key, value in manifest.items() if key != "xxh3"} | {"files": files}
        store.objects[own] = encode_manifest(MirrorManifest(**facts))


HOW = ("missing", "damaged", "cut", "../outside.safetensors", "checkpoints/step-4/run.py")


@pytest.mark.parametrize("how", usual(HOW, ("damaged", "../outside.safetensors")))
def test_the_newest_checkpoint_that_is_whole_is_taken(how, tiny, tmp_path, store, whole):
    config = config_of(tiny, tmp_path / "run")
    train(config, callbacks=[Paced(store)])
    shutil.rmtree(config.folder)
    _, newest = manifests(store)
    spoil(store, newest, how)
    train(config)
    (refused,) = events(config.folder, "refused")
    assert "step-4." in refused["why"]
    assert "the one before it is tried" in refused["why"]
    assert [event["step"] for event in events(config.folder, "resumed")] == [3]
    require_equal(state_of(config.folder, 4), whole())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing is written outside"


@pytest.mark.exhaustive
def test_no_run_starts_over_beside_checkpoints_that_are_damaged(tiny, tmp_path, store):
    config = config_of(tiny, tmp_path / "run", 2)
    train(config)
    shutil.rmtree(config.folder)
    for manifest in manifests(store):
        spoil(store, manifest, "damaged")
    with pytest.raises(CheckpointError, match=r"no checkpoint in the mirror is complete.*does not match") as refused:
        train(config)
    assert refused.value.fixes[0].settings == {"checkpoint.mirror": f"{MIRROR}-2"}


def test_the_disk_wins_where_it_is_newer(tiny, tmp_path, store, whole):
    config = config_of(tiny, tmp_path / "run")
    train(config)
    for manifest in manifests(store):
        if manifest["step"] == 4:
            spoil(store, manifest, "cut")
    shutil.rmtree(config.folder / "final")
    train(config)
    assert [event["step"] for event in events(config.folder, "resumed")] == [4]
    assert not [event for event in events(config.folder, "mirror") if "downloading" in event["why"]]
    assert manifests(store)[-1]["step"] == 4, "what the store lacks is sent again"


def test_a_mirror_of_another_run_is_refused(tiny, tmp_path, store, capsys):
    train(config_of(tiny, tmp_path / "one", 2))
    other = config_of(tiny, tmp_path / "other", 2, mirror=f"{MIRROR}-2")
    train(other)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of run .* but .*other is run") as refused:
        train(config_of(tiny, tmp_path / "other", 2))
    assert refused.value.fixes[0].settings == {"checkpoint.mirror": f"{MIRROR}-2"}
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0.001 in the checkpoint") as refused:
        train(config_of(tiny, tmp_path / "third", 2, optim={"lr": 2e-3}))
    assert refused.value.fixes[0].settings["checkpoint.mirror"] == f"{MIRROR}-2"
    (file := tmp_path / "one.yaml").write_text(dump_config(config_of(tiny, tmp_path / "one", 2)))
    assert main(["train", str(file), "--restart"]) == 2
    assert f"checkpoint.mirror={MIRROR}-2" in capsys.readouterr().err
    assert main(["train", str(file), "--restart", "checkpoint.mirror=s3://bucket/anew"]) == 0
    assert [one["step"] for one in manifests(store, "anew")] == [1, 2]


@pytest.mark.exhaustive
def test_a_slow_store_gets_the_newest_checkpoint_and_training_does_not_wait(tiny, tmp_path, store):
    store.write_s = 0.05
    config = config_of(tiny, tmp_path / "run", 8)
    train(config)
    assert manifests(store)[-1]["step"] == 8
    assert len(events(config.folder, "mirrored")) < 8
    assert not events(config.folder, "not_mirrored")


def test_folders_are_mirrors_too(tiny, tmp_path, whole):
    config = config_of(tiny, tmp_path / "run", mirror=f"file://{tmp_path}/disk/run")
    train(config)
    shutil.rmtree(config.folder)
    (config_file := Path(tmp_path / "run.yaml")).write_text(dump_config(config))
    assert main(["train", str(config_file)]) == 0
    require_equal(state_of(config.folder, 4), whole())


@pytest.mark.exhaustive
def test_ranks_that_shard_their_state_go_on_from_the_store(tiny, tmp_path, store):
    config = config_of(tiny, tmp_path / "run", strategy="fsdp")
    (file := tmp_path / "run.yaml").write_text(dump_config(config))
    weights = []
    for life in range(2):
        logs = tmp_path / f"logs-{life}"
        for rank in start_warm_ranks(2, lambda rank: ["-m", "flatout", "train", str(file)], logs):
            assert rank.wait(300) == 0, [log.read_text() for log in logs.rglob("*.log")]
        assert life == len(events(config.folder, "resumed"))
        shards = sorted((config.folder / "checkpoints/step-4").glob("*-rank-*.safetensors"))
        assert len(shards) == 4
        weights.append({f"{path.name} {name}": value for path in shards for name, value in load_file(path).items()})
        shutil.rmtree(config.folder)
        for name in [name for name in store.objects if "/step-4." in name]:
            del store.objects[name]
    require_equal(*weights)
