"""What is written for clusters, read back by the shell and by a YAML reader."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import flatout
from flatout import errors
from flatout.cli.main import main
from flatout.errors import UsageError
from flatout.launch.attempt import RESTARTABLE
from flatout.launch.jobs import ClusterJob, manifest, sbatch_script, skypilot_task
from flatout.launch.launch_mode import Nodes, SpawnRanks, choose_launch_mode

WORDS = ["train", "it's; $(touch x).yaml", "model.name=a b"]


def slurm(**more: Any) -> str:
    job = ClusterJob(more.pop("name", "run"), 2, 4, WORDS, python="/venv/bin/python")
    return sbatch_script(job, **{"folder": Path("/my work"), "log_dir": Path("/runs/a"), **more})


def test_the_script_runs_exactly_the_words(tmp_path):
    folder = tmp_path / "my work"
    folder.mkdir()
    # a folder that is not there yet, with a name that only a shell's quotes can hold
    logs = tmp_path / "runs" / "a b%"
    script = slurm(folder=folder, log_dir=logs)
    assert "#SBATCH --ntasks-per-node=4\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "partition" not in script
    done = submit(tmp_path, script, 'printf "%s\\n" "$PWD" "${#FLATOUT_SECRET}" "$@"; exit 75', SLURM_CPUS_PER_TASK="8")
    # a rank that has saved must not end those that still save
    run = ["--kill-on-bad-exit=0", "--wait=120", "--", "/venv/bin/python", "-P", "-m", "flatout", *WORDS]
    assert done.stdout == f"the log is {logs}/slurm-7.log\n"
    assert (logs / "slurm-7.log").read_text().splitlines() == [str(folder), "64", *run, "scontrol requeue 7"]
    assert (done.returncode, done.stderr) == (75, "")
    assert not (folder / "x").exists()
    assert submit(tmp_path, script, 'echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS"', SLURM_CPUS_PER_TASK="6")
    assert submit(tmp_path, script, 'echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS"', OMP_NUM_THREADS="3")
    assert (logs / "slurm-7.log").read_text().splitlines()[-2:] == ["6 6", "1 3"]


def submit(tmp_path: Path, script: str, srun: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a srun of this body, and a scontrol that writes its words."""
    for name, body in {"srun": srun, "scontrol": 'echo "scontrol $*"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **env}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)


def test_every_exit_code_is_requeued_as_often_as_it_helps(tmp_path):
    """What was saved always, what a restart may help twice here, the rest never; srun reports signal N as 128 + N."""
    codes = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")}
    killed = (signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM, signal.SIGSYS, signal.SIGRTMAX)
    again = {*RESTARTABLE, *(128 + number for number in killed)}
    # two Ctrl-C end a run for good
    for code in {0, *codes, *again, 128 + signal.SIGINT}:
        logs = tmp_path / str(code)
        script = slurm(folder=tmp_path, log_dir=logs, max_restarts=2)
        saved = errors.PreemptedError.exit_code
        # Slurm's own count says five throughout: it includes the requeues after a save
        for each in (saved, code, code, code):
            assert submit(tmp_path, script, f"exit {each}", SLURM_RESTART_COUNT="5").returncode == each
        expected = 4 if code == saved else 3 if code in again else 1
        assert (logs / "slurm-7.log").read_text().count("scontrol requeue 7\n") == expected, code


# time limit -> seconds before its end at which the run is asked to save; 0: no limit
TIMES = {
    "4": 60, "5:30": 82, "06:00": 90, "0:10:00": 150, "0:30:00": 300, "0-1": 300, "0-0:5": 75, "0-0:5:20": 80, "0": 300,
}  # fmt: skip


def test_a_run_is_asked_to_save_after_three_quarters_of_a_short_limit():
    for time, notice in TIMES.items():
        assert f"#SBATCH --time={time}\n#SBATCH --signal=TERM@{notice}\n" in slurm(time=time)
    for time in ("3", "3:59", "0-0:3:59"):
        with pytest.raises(UsageError, match=rf"^--time {time} "):
            slurm(time=time)


def test_a_run_on_the_cpu_asks_for_no_gpus():
    script = slurm(on_cpu=True)
    assert "gpus" not in script
    assert "#SBATCH --ntasks-per-node=4\n" in script


def test_what_sbatch_lines_cannot_hold_is_refused():
    times = ("1h", "", "1-", ":30", "1:2:3:4", "1-2:3:4:5", "UNLIMITED", "5\n", "-1")
    wrong: list[Any] = [{"name": "a b"}, {"partition": "p\n#SBATCH --uid=0"}, *({"time": time} for time in times)]
    for values in wrong:
        with pytest.raises(UsageError):
            slurm(**values)


def test_a_pytorch_job():
    body = yaml.safe_load(manifest(ClusterJob("run", 3, 8, WORDS), "img:1", "claim", secret="run-secret"))
    assert (body["kind"], body["spec"]["nprocPerNode"]) == ("PyTorchJob", "8")
    replicas = body["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 2)
    container = replicas["Master"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert container["command"] == ["python", "-P", "-m", "flatout", *WORDS]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    (secret,) = container["env"]
    assert secret["name"] == "FLATOUT_SECRET"
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "run-secret", "key": "secret"}}


EXAMPLE = Path(__file__).parents[3] / "examples" / "kubernetes" / "cluster-training-runtime.yaml"
# the fields of kubeflow-training 1.9's models, whose package needs the whole client of Kubernetes
PYTORCH_JOB = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
RUN_POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend"}
RUN_POLICY |= {"ttlSecondsAfterFinished"}
REPLICAS = {"replicas", "restartPolicy", "template"}


def checked(kind: str, body: Any) -> Any:
    """Read a body by the published model of its kind; fail for a field that the model would drop."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    require_kept(body, getattr(models, kind).from_dict(body).to_dict())
    return body


def require_kept(given: Any, kept: Any, place: str = "") -> None:
    if isinstance(given, dict):
        assert given.keys() <= kept.keys(), f"{place}: no field {given.keys() - kept.keys()}"
        for name, value in given.items():
            require_kept(value, kept[name], f"{place}.{name}")
    elif isinstance(given, list):
        assert len(given) == len(kept), place
        for number, pair in enumerate(zip(given, kept, strict=True)):
            require_kept(*pair, f"{place}[{number}]")
    else:
        assert given == kept, place


def train_job(**more: Any) -> Any:
    return yaml.safe_load(manifest(ClusterJob("run", 2, 4, WORDS), "img:1", "claim", kind="TrainJob", **more))


def mounts_of(pod: Any) -> dict[str, Any]:
    """The source of each volume, by where the container mounts it."""
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    return {mount["mountPath"]: sources[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("secret", [None, "run-secret"])
def test_manifests_have_only_fields_of_the_published_api(secret):
    checked("TrainerV1alpha1TrainJob", train_job(secret=secret))
    checked("TrainerV1alpha1ClusterTrainingRuntime", yaml.safe_load(EXAMPLE.read_text()))
    spec = yaml.safe_load(manifest(ClusterJob("run", 3, 8, WORDS), "img:1", "claim", secret=secret))["spec"]
    assert spec.keys() <= PYTORCH_JOB
    assert spec["runPolicy"].keys() <= RUN_POLICY
    for replicas in spec["pytorchReplicaSpecs"].values():
        assert replicas.keys() <= REPLICAS
        checked("IoK8sApiCoreV1PodTemplateSpec", replicas["template"])


def test_a_field_that_the_api_dropped_is_found():
    """As podTemplateOverrides, which carried the volumes before Kubeflow Trainer 2.3."""
    body = train_job()
    body["spec"]["podTemplateOverrides"] = body["spec"].pop("runtimePatches")
    with pytest.raises(AssertionError, match=r"no field .*podTemplateOverrides"):
        checked("TrainerV1alpha1TrainJob", body)


def test_every_pod_has_the_volume_the_memory_the_folder_and_the_time_to_save():
    (patch,) = train_job(mount="/data")["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (own,) = yaml.safe_load(EXAMPLE.read_text())["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == own["name"] == "node"
    pytorch_job = yaml.safe_load(manifest(ClusterJob("run", 1, 8, WORDS), "img:1", "claim", "/data"))
    replicas = pytorch_job["spec"]["pytorchReplicaSpecs"]
    pods = {
        "/data": job["template"]["spec"]["template"]["spec"],
        "/work": own["template"]["spec"]["template"]["spec"],
        "/data/": replicas["Master"]["template"]["spec"],
    }
    for mount, pod in pods.items():
        assert pod["terminationGracePeriodSeconds"] == 600
        mounted = mounts_of(pod)
        assert "persistentVolumeClaim" in mounted[mount.rstrip("/")]
        assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert pods["/work"]["containers"][0]["workingDir"] == "/work"
    assert pods["/data/"]["containers"][0]["workingDir"] == "/data"
    # env of coreutils starts the rest as it is, without a shell
    assert train_job(mount="/data")["spec"]["trainer"]["command"][:3] == ["env", "--chdir=/data", "python"]


def test_the_runtime_restarts_what_a_restart_helps():
    """By every exit code that an error of flatout has."""
    (job,) = yaml.safe_load(EXAMPLE.read_text())["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    codes = {
        error.exit_code for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "exit_code")
    }
    saved = errors.PreemptedError.exit_code
    assert actions == dict.fromkeys(codes - RESTARTABLE - {saved}, "FailJob") | {saved: "Ignore"}


def test_a_train_job_and_what_its_pods_do():
    body = train_job(runtime="own")
    assert body["spec"]["runtimeRef"] == {"name": "own"}
    trainer = body["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "run-node-0-0.run"}
    expected = SpawnRanks(4, Nodes(2, 2, 0, "run-node-0-0.run:29400"))
    assert choose_launch_mode(env, gpus=None, on_cpu=False, nodes=None) == expected


def test_names_that_kubernetes_refuses():
    for wrong in ({"name": "Run"}, {"claim": "a_b"}, {"runtime": "a b"}, {"image": "a b"}, {"mount": "work"}):
        values: dict[str, Any] = {"image": "i", "claim": "c", **wrong}
        with pytest.raises(UsageError):
            manifest(ClusterJob(values.pop("name", "run"), 1, 1, WORDS), **values)


def test_the_verb_writes_and_submits_nothing(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("name: My_run\nmodel: {name: x}\ngpus: [0, 1]\n")
    out = tmp_path / "job.yaml"
    assert main(["launch", str(config), "--kubernetes", "--out", str(out), "lora.rank=8"]) == 0
    body = yaml.safe_load(out.read_text())
    assert body["metadata"]["name"] == "my-run"
    assert body["spec"]["nprocPerNode"] == "2"
    assert "nothing was submitted" in capsys.readouterr().out
    assert main(["launch", str(config), "--kubernetes", "--out", str(out), "--nodes", "2"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert yaml.safe_load(out.read_text()) == body
    out.unlink()
    assert main(["launch", str(config), "--kubernetes", "--out", str(out), "--nodes", "2"]) == 0
    assert "kubectl create secret generic my-run-secret " in capsys.readouterr().out
    assert main(["launch", str(config), "--slurm", "--nodes", "2"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert main(["launch", str(config), "--slurm", "--name", "a b"]) == 2
    assert main(["launch", str(config), "--kubernetes", "--runtime", "own"]) == 2
    assert "--runtime needs --train-job" in capsys.readouterr().err
    assert main(["launch", str(config), "--kubernetes", "--train-job", "--runtime", "own"]) == 0
    assert 'name: "own"' in capsys.readouterr().out


def test_train_in_tmux_dry(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(f"run_dir: {tmp_path / 'run'}\nmodel: {{name: x}}\ndevice: cpu\n")
    assert main(["train", str(config), "--tmux", "job", "--dry-run", "gpus=[0,1]"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("cd ")
    assert "job_gpu_1" in printed
    assert f"{tmp_path}/run/logs/latest/rank-1.log" in printed
    assert "'gpus=[0,1]'" in printed
    assert not (tmp_path / "run").exists()
    assert main(["train", str(config), "--tmux", "no.dots", "--dry-run"]) == 2
    assert main(["train", str(config), "--dry-run"]) == 2


def test_processes_that_a_source_tree_starts_find_its_flatout(tmp_path):
    """They leave out the working folder, which only then must be in PYTHONPATH, before what it has."""
    (tmp_path / "flatout").symlink_to(Path(flatout.__file__).parent)
    (tmp_path / "run.yaml").write_text("run_dir: run\nmodel: {name: x}\ndevice: cpu\n")
    command = [sys.executable, "-m", "flatout", "train", "run.yaml", "--tmux", "job", "--dry-run"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "/more"}, capture_output=True, text=True, check=True
    )
    assert f"-e PYTHONPATH={tmp_path}:/more " in done.stdout
    assert f"{sys.executable} -P -m flatout train run.yaml" in done.stdout


# the fields of a task of SkyPilot 0.14, as far as ours have them, and their types
TASK = {
    "name": str, "num_nodes": int, "workdir": str, "file_mounts": dict, "resources": dict, "secrets": dict,
    "setup": str, "run": str,
}  # fmt: skip
RESOURCES = {"accelerators": str, "use_spot": bool, "job_recovery": dict}


def skypilot(*, is_spot: bool = False, **more: Any) -> Any:
    return yaml.safe_load(skypilot_task(ClusterJob("run", more.get("nodes", 2), 4, WORDS), "H100", is_spot=is_spot))


def test_a_skypilot_task_runs_exactly_the_words_on_each_node(tmp_path):
    body = skypilot(is_spot=True)
    assert {name: type(value) for name, value in body.items()} == TASK
    assert {name: type(value) for name, value in body["resources"].items()} == RESOURCES
    assert body["resources"] == {
        "accelerators": "H100:4", "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [errors.PreemptedError.exit_code]},
    }  # fmt: skip
    assert body["secrets"] == {"FLATOUT_SECRET": None}
    assert "secrets" not in skypilot(nodes=1)
    assert "job_recovery" not in skypilot()["resources"]
    assert (Path(body["file_mounts"]["~/flatout"]) / "flatout" / "launch").is_dir()
    home = tmp_path / "home"
    (home / "flatout-env" / "bin").mkdir(parents=True)
    (home / "flatout-env" / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    env |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    done = subprocess.run(["bash", "-c", body["run"]], capture_output=True, text=True, env=env, check=True)
    nodes = ["--nnodes", "2", "--node-rank", "1", "--rdzv", "10.0.0.1:29400"]
    assert done.stdout.splitlines() == ["-P", "-m", "flatout", *WORDS, "gpus=4", *nodes]


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("is_spot", [True, False])
def test_skypilot_reads_its_task(nodes, is_spot):
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    body = skypilot(is_spot=is_spot, nodes=nodes)
    jsonschema.validate(body, schemas.get_task_schema())
    jsonschema.validate(body["resources"], schemas.get_resources_schema())


def test_a_run_folder_that_is_lost_with_its_machine_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: Qwen/Qwen3-0.6B\ndata: rows.jsonl\n")
    launch = ["launch", "run.yaml", "--skypilot"]
    assert main([*launch, "--spot"]) == 2
    assert "checkpoint.mirror=s3://bucket/runs/run" in capsys.readouterr().err
    assert main([*launch, "--nodes", "2", "checkpoint.mirror=s3://bucket/run"]) == 2
    said = capsys.readouterr().err
    assert "all nodes share the run folder" in said
    assert "run_dir=/mnt/shared/runs/run" in said
    for words, submit in {
        ("--spot", "checkpoint.mirror=s3://bucket/run"): "sky jobs launch task.yaml",
        ("--spot", "run_dir=/mnt/shared/run"): "sky jobs launch task.yaml",
        (): "sky launch task.yaml",
        ("--nodes", "2", "run_dir=/mnt/shared/run"): "sky launch --secret FLATOUT_SECRET task.yaml",
    }.items():
        assert main([*launch, "--out", "task.yaml", *words]) == 0
        assert capsys.readouterr().out.strip().endswith(submit)
        assert yaml.safe_load(Path("task.yaml").read_text())["run"].count("run.yaml")
        Path("task.yaml").unlink()
