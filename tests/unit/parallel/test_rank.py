import os
import socket
import subprocess
import sys
import tempfile

import pytest
import torch
from torch import nn

from flatout.config.read import make_config
from flatout.environment import allocator_env, keep_compiled_kernels
from flatout.errors import ResourceError, UsageError
from flatout.parallel.process_group import choose_device, join_group
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Single, strategy_class
from flatout.planner.parallel_layout import SINGLE_RANK
from tests.usual import usual


def test_rank_is_read_from_the_environment():
    assert Rank.from_env({}) == Rank(0, 1, 0)
    assert Rank.from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == Rank(3, 4, 1)


@pytest.mark.parametrize("env", [{"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1"}])
def test_nonsense_is_refused(env):
    with pytest.raises(UsageError, match=r"RANK"):
        Rank.from_env(env)


def test_a_gpu_that_is_not_there_is_named():
    assert choose_device("cpu", Rank()) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto", Rank()) == torch.device("cpu")
        with pytest.raises(ResourceError, match="device: cuda needs a GPU, but "):
            choose_device("cuda", Rank())


def test_nodes_are_counted_where_they_hold_equally_many_ranks():
    env = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    nodes = [Rank.from_env({**env, "LOCAL_WORLD_SIZE": size}).num_nodes for size in ("4", "8", "3", "0")]
    assert nodes == [2, 1, 1, 1]


def test_single_does_nothing_and_measures_the_norm():
    strategy = strategy_class("single")(Rank(), torch.device("cpu"), make_config({"model": {"name": "x"}}), SINGLE_RANK)
    assert isinstance(strategy, Single)
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float64)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    strategy.sum_gradients(parameters)
    assert strategy.grad_norm(parameters).item() == 5.0
    assert strategy.grad_norm(parameters[1:]).item() == 0.0
    assert strategy.sum_values(torch.tensor([1.0])).item() == 1.0


def test_compiled_kernels_are_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = tmp_path / "flatout" / "compiler"
    assert keep_compiled_kernels() == str(folder)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for chosen in ("/chosen", f"{tempfile.gettempdir()}/chosen"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
        assert keep_compiled_kernels() == chosen


def test_a_cache_folder_that_cannot_be_made_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert "is not writable" in keep_compiled_kernels()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_segments_grow_unless_the_user_has_set_the_allocator(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    assert allocator_env({"PATH": "/bin"})["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True,pinned_use")
    assert allocator_env({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}) == {}
    monkeypatch.setattr("sys.platform", "win32")
    assert allocator_env({}) == {}


ENTRIES = [
    "from flatout.cli.main import main; main(['--version'])",
    "import flatout; flatout.train",
    "import flatout_migrate.unsloth",
    "from flatout.environment import prepare_torch; prepare_torch({})",
]
OWN = [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}]


CASES = [*((one, {}) for one in ENTRIES), *((ENTRIES[0], own) for own in OWN)]


@pytest.mark.parametrize(("enter", "own"), usual(CASES, [CASES[1], CASES[-1]]))
def test_idle_threads_sleep_at_every_entry_unless_the_user_has_set_how_they_wait(enter, own):
    # what OpenMP would read: the environment as the first import of torch sees it
    code = f"""
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
            print({{name: os.environ[name] for name in names if name in os.environ}})
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Finder())
try:
    {enter}
except SystemExit:
    pass
import torch
"""
    env = {name: value for name, value in os.environ.items() if name[:4] not in ("OMP_", "GOMP", "KMP_")} | own
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(own or {"OMP_WAIT_POLICY": "passive"})


def test_a_taken_port_is_named_by_rank_0(monkeypatch):
    """A launcher's port, which another program has; ranks that meet at a free one are in tests/distributed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ResourceError, match=rf"^MASTER_PORT is {port}, where another process of this node listens"):
            join_group(Rank(0, 2, 0), torch.device("cpu"), join_s=30)
