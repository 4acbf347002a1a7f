"""The launcher's command line and environment, read back by torch's own parser."""

import os
from pathlib import Path

from torch.distributed.run import get_args_parser

from flatout.launch.command import Attempt, launcher_argv, launcher_environment
from flatout.launch.nodes import Nodes
from flatout.launch.place import Start

WORDS = ["train", "odd name; $(x).yaml", "model.name=a b"]


def test_torchs_launcher_understands_the_command() -> None:
    argv = launcher_argv(Attempt(Start("2", Nodes()), WORDS, "run"), "python")
    assert argv[:5] == ["python", "-m", "flatout.launch.agent", str(os.getpid()), "torch.distributed.run"]
    args = get_args_parser().parse_args(argv[5:])
    assert (args.nproc_per_node, args.nnodes, args.max_restarts) == ("2", "1:1", 0)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.local_addr) == ("c10d", "127.0.0.1:0", "127.0.0.1")
    assert args.module
    assert [args.training_script, *args.training_script_args] == ["flatout", *WORDS]


def test_several_nodes_meet_at_the_endpoint() -> None:
    nodes = Nodes(1, 2, 1, "10.0.0.1:29400")
    args = get_args_parser().parse_args(launcher_argv(Attempt(Start("gpu", nodes), WORDS, "r", "10.0.0.2"), "p")[5:])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("1:2", "gpu", "10.0.0.1:29400")
    assert args.local_addr == "10.0.0.2"
    assert args.rdzv_conf.startswith("is_host=0,")


def test_the_environment_of_the_ranks() -> None:
    parent = {"PATH": "/bin", "RANK": "3", "PET_NNODES": "2", "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    attempt = Attempt(Start("2", Nodes(), ("1", "2")), WORDS, "run")
    env = launcher_environment(attempt, parent, Path("/logs"), num_cores=8)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in env
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["PATH"]) == ("1,2", "7", "/bin")
    assert not {"RANK", "PET_NNODES"} & env.keys()
    assert parent["RANK"] == "3"
    del parent["OMP_NUM_THREADS"]
    assert launcher_environment(attempt, parent, Path("/logs"), num_cores=8)["OMP_NUM_THREADS"] == "4"


def test_only_ranks_of_several_nodes_get_a_store_of_their_own() -> None:
    """A port that is looked up before they start may be taken when they do; the launcher's store is there already."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    for nodes, expected in ((Nodes(), None), (Nodes(1, 2, 1, "10.0.0.1:29400"), "1")):
        env = launcher_environment(Attempt(Start("2", nodes), WORDS, "run"), {name: "1"}, Path("/logs"), num_cores=8)
        assert env.get(name) == expected
