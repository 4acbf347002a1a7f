"""Where a run trains, decided from an environment as a value."""

import pytest

from flatout.errors import ResourceError, UsageError
from flatout.launch.launch_mode import (
    Nodes,
    RunHere,
    SpawnRanks,
    choose_launch_mode,
    parse_nodes,
    slurm_rank,
    visible_devices,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("env", "gpus", "expected"),
    [
        ({}, None, RunHere({})),
        ({}, [1], RunHere({"CUDA_VISIBLE_DEVICES": "1"})),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6"}, [2], RunHere({"CUDA_VISIBLE_DEVICES": "6"})),
        ({}, [2, 3], SpawnRanks(2, Nodes(), ("2", "3"))),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, [1, 0], SpawnRanks(2, Nodes(), ("GPU-b", "GPU-a"))),
        # ranks of a launcher start nothing, whatever gpus says
        (TORCHRUN, [0, 1], RunHere({})),
        # a batch script has SLURM_PROCID but is no rank
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, [0, 1], SpawnRanks(2, Nodes(), ("0", "1"))),
        # one process a pod is a rank; several are started by torch's launcher
        (POD, None, RunHere({"LOCAL_RANK": "0"})),
        (POD, [0, 1], SpawnRanks(2, Nodes(2, 2, 1, "job-master-0:23456"), ("0", "1"))),
        (TRAIN_JOB, None, SpawnRanks(4, Nodes(2, 2, 1, "job-node-0-0.job:29400"))),
        (
            {**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"},
            None,
            SpawnRanks("gpu", Nodes(2, 2, 1, "job-node-0-0.job:29400")),
        ),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, None, RunHere({})),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu"}, None, SpawnRanks("gpu", Nodes())),
        ({**POD, **TRAIN_JOB}, None, SpawnRanks(4, Nodes(2, 2, 1, "job-node-0-0.job:29400"))),
    ],
)
def test_every_launcher_is_recognised(env, gpus, expected):
    assert choose_launch_mode(env, gpus=gpus, on_cpu=False, nodes=None) == expected


def test_on_the_cpu_gpus_count_processes():
    env = {"CUDA_VISIBLE_DEVICES": ""}
    assert choose_launch_mode(env, gpus=[0, 1, 5], on_cpu=True, nodes=None) == SpawnRanks(3, Nodes())
    assert choose_launch_mode(env, gpus=[3], on_cpu=True, nodes=None) == RunHere({})
    nodes = Nodes(1, 2, 0, "h:1")
    assert choose_launch_mode({}, gpus=None, on_cpu=True, nodes=nodes) == SpawnRanks(1, nodes)
    assert choose_launch_mode({}, gpus=None, on_cpu=False, nodes=nodes) == SpawnRanks("gpu", nodes)


def test_slurm_tasks_become_ranks():
    place = choose_launch_mode(SRUN, gpus=None, on_cpu=False, nodes=None)
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03", "MASTER_PORT": "22389"}
    assert place == RunHere(expected)
    bound = slurm_rank({**SRUN, "CUDA_VISIBLE_DEVICES": "3", "MASTER_ADDR": "x", "MASTER_PORT": "9"})
    assert bound is not None
    assert (bound["LOCAL_RANK"], bound["MASTER_ADDR"], bound["MASTER_PORT"]) == ("0", "x", "9")
    other_step = slurm_rank({**SRUN, "SLURM_STEP_ID": "3"})
    assert other_step is not None
    assert other_step["MASTER_PORT"] != expected["MASTER_PORT"]


def test_the_first_host_of_a_node_list():
    hosts = {"a": "a", "a,b": "a", "n[03-07,12],x": "n03", "n[5]-ib,x": "n5-ib", "n1-[2,4]": "n1-2"}
    for nodelist, host in hosts.items():
        found = slurm_rank({**SRUN, "SLURM_STEP_NODELIST": nodelist})
        assert found is not None
        assert found["MASTER_ADDR"] == host


def test_a_hidden_gpu_is_refused_by_name():
    with pytest.raises(ResourceError, match=r"gpus names GPU 2, but CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        visible_devices({"CUDA_VISIBLE_DEVICES": "4,5"}, gpus=[0, 2], on_cpu=False)
    with pytest.raises(ResourceError, match=r"shows 0"):
        choose_launch_mode({"CUDA_VISIBLE_DEVICES": ""}, gpus=[0], on_cpu=False, nodes=None)


def test_nonsense_about_nodes_names_the_option():
    for nnodes, rank, rdzv, says in (
        ("two", 0, None, "--nnodes"), ("2:1", 0, "h:1", "--nnodes"), ("0", 0, None, "--nnodes"),
        ("2", 2, "h:1", "--node-rank"), ("2", 0, None, "--rdzv"), ("2", 0, "host", "--rdzv"),
        ("2", 0, "h:99999", "--rdzv"), ("2", 0, "h,is_host=1:5", "--rdzv"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            parse_nodes(nnodes, rank, rdzv)


def test_nodes():
    assert parse_nodes("1", 0, None) == Nodes()
    nodes = parse_nodes("1:3", 2, "[fd00::1]:500")
    assert (nodes.num_min, nodes.num_max, nodes.endpoint) == (1, 3, "[fd00::1]:500")
