"""The only module that reads environment variables."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flatout.errors import UsageError

# the current name first, then the older names that torch still reads
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# set by `flatout train` for the ranks it starts: where they log, the parent process, the secret that authenticates
# ranks to each other (set by the user for several nodes and other launchers), rank 0's listening store socket, the
# open file of their status board, and the Unix time at which this attempt began
LOGS = "FLATOUT_LOGS"
PARENT = "FLATOUT_PARENT"
SECRET = "FLATOUT_SECRET"
STORE_SOCKET = "FLATOUT_STORE_SOCKET"
STATUS_BOARD = "FLATOUT_STATUS_BOARD"
LAUNCHED = "FLATOUT_LAUNCHED"
MIN_SECRET = 16
# set by the user: start-up checks everything anew, whatever earlier starts have proved
CHECK_AGAIN = "FLATOUT_CHECK_AGAIN"
# set by the user: kernels are chosen as on a GPU of this compute capability, such as 8.0
CAPABILITY = "FLATOUT_CAPABILITY"
# set by `flatout studio` for its workers and runs, as a JSON list: the workspace, then the folders of models
STUDIO_FOLDERS = "FLATOUT_STUDIO_FOLDERS"
# the variables by which torch launchers identify a process within a run
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def environment_of_child() -> dict[str, str]:
    """Return the environment for a process beside a run: what describes this one as a rank does not apply to it."""
    hidden = {*RANK_VARIABLES, LOGS, PARENT, SECRET, STORE_SOCKET}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def set_environment(values: Mapping[str, str]) -> None:
    """Set variables of this process; those for CUDA and the process group only take effect before torch reads them."""
    os.environ.update(values)


def require_docstrings() -> None:
    """Raise UsageError if Python drops docstrings, which transformers reads to define its models."""
    if sys.flags.optimize >= 2:
        why = "PYTHONOPTIMIZE=2 (or -OO), which drops the docstrings that transformers needs"
        raise UsageError(f"Python runs with {why}; unset it, or set it to 1")


def let_children_import_flatout(working_folder: str) -> None:
    """Name the folder of this package in PYTHONPATH if it is imported from the working folder, which -P leaves out."""
    root = str(Path(__file__).parents[1])
    if working_folder == root and root not in sys.path:
        sys.path.append(root)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def whole_number(env: Mapping[str, str], name: str, default: int | None = None, *, below: int | None = None) -> int:
    """Return a variable as an integer >= 0. Raises UsageError for other text, and if it is unset without a default."""
    if name not in env and default is not None:
        return default
    text = env.get(name, "")
    if text.isascii() and text.isdigit() and (below is None or int(text) < below):
        return int(text)
    got = repr(text) if name in env else "missing"
    expected = "a whole number" if below is None else f"a whole number below {below}"
    together = f"; a launcher sets {', '.join(RANK_VARIABLES)} together, so set all of them or none"
    end = together if name in RANK_VARIABLES else ""
    raise UsageError(f"{name} is {got} in the environment, expected {expected}{end}")


def master() -> tuple[str, int]:
    """Return the host and port where rank 0's store listens. Raises UsageError if the environment lacks them."""
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise UsageError("MASTER_ADDR is missing or empty in the environment; set it to the address of rank 0's node")
    return host, whole_number(os.environ, "MASTER_PORT", below=1 << 16)


def secret_of_nodes(env: Mapping[str, str]) -> str:
    """Return the secret shared by the nodes of a run. Raises UsageError if it is missing or too easy to guess."""
    secret = env.get(SECRET, "")
    if len(secret) < MIN_SECRET or not (secret.isascii() and secret.isalnum()):
        raise UsageError(
            f"nodes authenticate each other with {SECRET}, which is missing or weak here; export the same secret on "
            f"every node, at least {MIN_SECRET} letters and digits, such as the output of `openssl rand -hex 32`"
        )
    return secret


def ask_for_deterministic_cublas() -> None:
    """Set cuBLAS's workspace so that its results are reproducible; call it before the process's first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def allocator_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that sets torch's allocator, for a process before it imports torch; empty if the user has.

    Steps differ in tokens, so without expandable segments, fragments left by earlier sizes can fill a GPU. One thread
    takes seconds to pin the copy of the state that asynchronous saves need, and kernel launches wait for it.
    """
    if sys.platform != "linux" or any(name in env for name in _ALLOCATOR_SETTINGS):
        return {}
    pinned = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    return {_ALLOCATOR_SETTINGS[0]: f"expandable_segments:True,{pinned}"}


def let_idle_threads_sleep() -> None:
    """Let OpenMP's idle threads sleep, unless the user has set how they wait; call it before torch is imported.

    By default they spin at each of a step's hundreds of barriers, until a thread whose core another process has is
    back. Results do not depend on it.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def prepare_torch(values: Mapping[str, str]) -> None:
    """Set the variables that torch reads once, and `values`; call it before torch is imported."""
    require_docstrings()
    keep_compiled_kernels()
    let_idle_threads_sleep()
    set_environment({**allocator_env(environment()), **values})


def cache_folder() -> Path:
    """Return flatout's folder in the user's cache directory; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "flatout"


def home_folder() -> Path:
    """Return the user's home; for a user without any, as in some containers, an own folder in the temporary one."""
    home = os.path.expanduser("~")  # noqa: PTH111  (pathlib raises RuntimeError where there is none)
    return Path(tempfile.gettempdir(), f"flatout-{os.getuid()}") if home == "~" else Path(home)


def why_not_private(path: Path) -> str | None:
    """Return why another user could have written this file, or in this folder: it is not to be believed; else None."""
    if {path.lstat().st_uid, path.stat().st_uid} != {os.geteuid()}:
        return f"{path} belongs to user {path.stat().st_uid}, or is that user's link"
    return f"other users can write in {path}" if path.is_dir() and path.stat().st_mode & 0o022 else None


def checks_again() -> bool:
    """Whether the user asks start-up to check everything anew: CHECK_AGAIN is set, and not to 0."""
    return os.environ.get(CHECK_AGAIN, "0") not in ("", "0")


def studio_folders() -> list[Path]:
    """Return the workspace, and the folders of models, that this process of `flatout studio` may read; else none."""
    return [Path(folder) for folder in json.loads(os.environ.get(STUDIO_FOLDERS) or "[]")]


def named_capability() -> tuple[int, int] | None:
    """Return the compute capability (major, minor) in CAPABILITY; None if unset. Raises UsageError for other text."""
    if not (text := os.environ.get(CAPABILITY)):
        return None
    major, dot, minor = text.partition(".")
    if not (dot and text.isascii() and major.isdigit() and minor.isdigit()):
        raise UsageError(f"{CAPABILITY} is {text!r} in the environment, expected a compute capability such as 8.0")
    return int(major), int(minor)


def numeric_environment() -> dict[str, str]:
    """Return the variables that can change what torch, CUDA and the kernels' packages compute."""
    prefixes = (
        CAPABILITY, "CUBLAS", "CUDA", "CUDNN", "FLA_", "FLASH", "MKL", "NVIDIA", "NVTE", "PYTORCH", "TORCH", "TRITON",
        "TRANSFORMERS",
    )  # fmt: skip
    # variables that only name places, devices of one kind, or what to print
    others = ("CACHE", "DIR", "HOME", "LOGS", "PATH", "VISIBLE")
    names = (name for name in os.environ if name.startswith(prefixes) and not any(part in name for part in others))
    return {name: os.environ[name] for name in names}


def keep_compiled_kernels() -> str:
    """Let the compiler keep its kernels in the user's cache folder, which survives a reboot; return where.

    A folder that the user's environment names is kept. If the cache folder is not writable, the compiler's default
    (a temporary folder) is kept, and the returned text says so. Call it before the first compilation.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # torch writes its default, torchinductor_USER, into the environment as soon as a library imports its compiler
    default = Path(tempfile.gettempdir(), "torchinductor_").absolute()
    if named and not named.startswith(str(default)):
        return named
    folder = cache_folder() / "compiler"
    try:
        # private: anyone who can write here could make this user run other code
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if why := why_not_private(folder):
            return f"temporary files, because {why}"
    except OSError as error:
        return f"temporary files, because {folder} is not writable ({error.strerror})"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)
