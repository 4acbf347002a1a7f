"""What flatout itself wrote and somebody changed: token stores with their registry, and run folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_hostile import damages, mutations, write_json
from fuzz_judge import Case
from fuzz_world import World, both

_INPUTS = ("model", "data", "chats.jsonl", "run.yaml")
_STORE = "data/built_dataset/chats"
_CHECKPOINT = "run/checkpoints/step-2"


def store_cases(world: World) -> Iterator[Case]:  # noqa: C901  (a list of cases)
    """manifest, report, arrays and registry, opened by name, built again from the rows, shown and listed."""
    by_name = ("plan", "run.yaml", "data.sources=[]")
    again = ("plan", "run.yaml")
    show = ("data", "show", "chats", "-n", "2")
    listing = ("data", "list")

    def case(
        name: str, argv: tuple[str, ...], file: str, spoil: Callable[[Path], object], must: Any, drawn: bool = False
    ) -> Case:
        about = (Path(file).name, "chats", "data") if must == "refuse" else ()
        verb = " ".join(argv[:2]).replace("plan run.yaml", "plan") + (" by name" if argv is by_name else "")
        return Case(
            f"{name} {verb}", argv, both(world.put(*_INPUTS), lambda here: spoil(here / file)), must, about,
            keeps=("chats.jsonl", "model"), drawn=drawn,
        )  # fmt: skip

    for mutation in mutations(world.json(f"{_STORE}/manifest.json")):
        spoil = _json(mutation.tree)
        for argv in (by_name, again, show):
            # a damaged store with its rows at hand is built again
            must = "accept" if argv is again else "refuse" if not mutation.path else "either"
            yield case(f"manifest {mutation.name}", argv, f"{_STORE}/manifest.json", spoil, must, True)
    for mutation in mutations(world.json("data/data_config.json")):
        for argv in (by_name, listing, show):
            must = "refuse" if not mutation.path and mutation.value != [] else "either"
            yield case(f"registry {mutation.name}", argv, "data/data_config.json", _json(mutation.tree), must, True)
    arrays = [f"{_STORE}/{file.name}" for file in sorted((world.root / _STORE).glob("*.npy"))]
    for file in ("data/data_config.json", f"{_STORE}/manifest.json", *arrays):
        for damage in damages(text=file.endswith("json")):
            for argv in (by_name, again, show):
                must = "accept" if damage.harmless or (argv is again and "built" in file) else "refuse"
                if damage.name == "first-byte" and file.endswith("json"):
                    must = "accept" if must == "accept" else "refuse"
                if must == "refuse" and damage.name == "utf-16":  # JSON may be UTF-16
                    must = "either"
                yield case(f"{Path(file).name} {damage.name}", argv, file, damage.spoil, must, True)
    for mutation in mutations(world.json(f"{_STORE}/report.json"), widest=8):
        yield case(f"report {mutation.name}", show, f"{_STORE}/report.json", _json(mutation.tree), "either", True)


def run_cases(world: World) -> Iterator[Case]:  # noqa: C901  (a list of cases)
    """A finished run goes on to a third step, is asked again, answers, and is merged, after somebody changed a file."""
    on = ("train", "run.yaml", "batch.max_steps=3", "checkpoint.allow_change=[batch.max_steps]")
    same = ("train", "run.yaml")
    chat = ("chat", "run", "--prompt", "Hi.", "--max-new-tokens", "1")
    merge = ("merge", "run", "--out", "merged")

    def case(
        name: str, argv: tuple[str, ...], file: str, spoil: Callable[[Path], object], must: Any, drawn: bool = False
    ) -> Case:
        def done(here: Path, out: str) -> str | None:
            if argv[0] == "train" and not (here / "run/final/adapter_model.safetensors").is_file():
                return "no adapter in final/"
            if argv is on and not list(here.glob("run*/checkpoints/step-3")):
                return "step 3 was not taken"
            return None

        verb = "goes on" if argv is on else "again" if argv is same else argv[0]
        # what is finished is never lost, whatever else is broken
        keeps = (
            "chats.jsonl",
            "model",
            *(() if argv is on or "folder final" in name else ("run/final/adapter_model.safetensors",)),
        )
        about = (Path(file).name, *Path(file).parts[-2:-1]) if must == "refuse" else ()
        return Case(
            f"{name} {verb}", argv, both(world.put(*_INPUTS, "run"), lambda here: spoil(here / file)), must, about,
            keeps=keeps, done=done, drawn=drawn,
        )  # fmt: skip

    for file in ("run/run.json", f"{_CHECKPOINT}/manifest.json", f"{_CHECKPOINT}/state.json"):
        # without the newest, an older checkpoint serves; a file that was edited is never taken
        for mutation in mutations(world.json(file), widest=30):
            for argv in (on, same):
                yield case(f"{Path(file).name} {mutation.name}", argv, file, _json(mutation.tree), "either", True)
        for damage in damages(text=True):
            for argv in (on, same):
                yield case(f"{Path(file).name} {damage.name}", argv, file, damage.spoil, "either", True)
    for name in ("model.safetensors", "optimizer.safetensors", "rng-0.safetensors"):
        for damage in damages(text=False):
            yield case(f"{name} {damage.name}", on, f"{_CHECKPOINT}/{name}", damage.spoil, "either", True)
    for name in ("metrics.jsonl", "events.jsonl", "train.log", ".lock", "config.yaml"):
        for damage in damages(text=True):
            for argv in (on, same):
                # figures and logs never end a run; links out of the folder may be refused
                links = ("directory", "dangling-link", "link-to-itself", "link")
                must = "either" if damage.name in links or name == "config.yaml" else "accept"
                yield case(f"{name} {damage.name}", argv, f"run/{name}", damage.spoil, must, True)
    for damage in damages(text=True):
        for argv in (chat, merge):
            must = "accept" if damage.harmless else "either"
            yield case(f"config.yaml {damage.name}", argv, "run/config.yaml", damage.spoil, must)
    for name, content in {
        "no model": "seed: 1\n", "name is a list": "model: {name: [a]}\n",
        "name is null": "model: {name: null}\n", "a list": "- a\n", "a bomb": "a: &a [x]\nb: &b [*a]\nmodel: {name: *b}\n",  # noqa: E501
        "revision is a list": "model: {name: model, revision: [a]}\n", "3000 brackets": "model: " + "[" * 3000,
        "nothing": "", "python": "model: !!python/name:os.system\n", "a number": "7",
    }.items():  # fmt: skip
        for argv in (chat, merge):
            spoil = lambda file, text=content: file.write_text(text)  # noqa: E731
            yield case(f"config.yaml {name}", argv, "run/config.yaml", spoil, "refuse")
    for name, (spoil, must) in _TREES.items():
        for argv in (on, same):
            yield case(f"folder {name}", argv, "run", spoil, must)


def _json(tree: Any) -> Callable[[Path], None]:
    return lambda file: write_json(file, tree)


def _swap(folder: Path) -> None:
    older, newer = folder / "checkpoints/step-1", folder / "checkpoints/step-2"
    older.rename(folder / "aside")
    newer.rename(older)
    (folder / "aside").rename(newer)


def _final_of_others(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "final/mine.txt").write_text("notes of a person")


_TREES: dict[str, tuple[Callable[[Path], object], Any]] = {
    "without checkpoints": (lambda folder: shutil.rmtree(folder / "checkpoints"), "either"),
    "without checkpoints, with a file of a person": (_final_of_others, "either"),
    "checkpoints is a file": (
        lambda folder: (shutil.rmtree(folder / "checkpoints"), (folder / "checkpoints").write_text("x")), "refuse"
    ),
    "checkpoints swapped": (_swap, "either"),
    "checkpoint with another name": (
        lambda folder: (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-9"), "either"
    ),
    "checkpoint of a huge step": (
        lambda folder: (folder / "checkpoints/step-2").rename(folder / f"checkpoints/step-{10**30}"), "either"
    ),
    "stray files": (
        lambda folder: [(folder / "checkpoints" / name).write_text("x") for name in ("step-x", "step-", "zebra")], "accept"  # noqa: E501
    ),
    "run is a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "refuse"),
    "run is a dangling link": (lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")), "either"),
    "final is a file": (
        lambda folder: (shutil.rmtree(folder / "final"), (folder / "final").write_text("x")), "either"
    ),
    "final without adapter": (lambda folder: [file.unlink() for file in (folder / "final").iterdir()], "either"),
    "lock is a folder": (
        lambda folder: ((folder / ".lock").unlink(missing_ok=True), (folder / ".lock").mkdir()), "refuse"
    ),
    "everything but final is lost": (
        lambda folder: [
            shutil.rmtree(path) if path.is_dir() else path.unlink() for path in folder.iterdir() if path.name != "final"
        ],
        "either",
    ),
}  # fmt: skip


def environment_cases(world: World) -> Iterator[Case]:
    """Variables of launchers, of CUDA and of torch, half set or nonsense; a run of one process must live or say why."""
    made = world.put(*_INPUTS)
    numbers = ("-1", "0", "1", "2", "x", "", " ", "1.5", "1e3", "99999999999999999999", "\u0664", "nan", "0x10")
    for verb in (("plan", "run.yaml"), ("train", "run.yaml", "run_dir=new", "batch.max_steps=1")):
        # a full set of two ranks would wait for the second
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT",
                     "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID", "PET_NNODES",
                     "PET_NPROC_PER_NODE", "PET_NODE_RANK", "OMP_NUM_THREADS"):  # fmt: skip
            for value in numbers:
                # two processes of two nodes or tasks are right, and would wait for each other
                if (
                    verb[0] == "train"
                    and value in ("2", "\u0664", "9" * 20)
                    and name.startswith(("PET", "WORLD", "SLURM_N"))
                ):
                    continue
                yield Case(f"{name}={value} {verb[0]}", verb, made, env={name: value}, drawn=True)
        for name, values in _TEXTS.items():
            for value in values:
                yield Case(f"{name}={value[:20]} {verb[0]}", verb, made, env={name: value}, drawn=True)
        for name, env in _SETS.items():
            yield Case(f"{name} {verb[0]}", verb, made, env=env)
    for name, env in _REFUSED.items():
        yield Case(
            f"{name} train", ("train", "run.yaml", "run_dir=new"), made, "refuse", tuple(env), env=env, keeps=("run",)
        )


_TEXTS = {
    "MASTER_ADDR": ("", "x", "256.256.256.256", "a b", "::1", "x" * 5000),
    "CUDA_VISIBLE_DEVICES": ("", "-1", "x", "0,0", "0,", "GPU-zebra", "99", "a" * 5000),
    "PYTORCH_ALLOC_CONF": ("", "x", "expandable_segments:maybe", "max_split_size_mb:-1", ":", "a:b:c"),
    "PYTORCH_CUDA_ALLOC_CONF": ("", "x", "expandable_segments:maybe"),
    "TORCH_LOGS": ("zebra", "+all"),
    "TORCHINDUCTOR_CACHE_DIR": ("", "/proc/x", "chats.jsonl/x"),
    "XDG_CACHE_HOME": ("", "/proc/x", "chats.jsonl"),
    "HF_HOME": ("/proc/x", "chats.jsonl"),
    "TMPDIR": ("/proc/x", "nowhere"),
    "HOME": ("", "/proc/x"),
    "COLUMNS": ("0", "-1", "x", "1", "99999999"),
    "TERM": ("", "dumb", "zebra"),
    "NO_COLOR": ("1",),
    "LANG": ("C", "zebra"),
    "PYTHONIOENCODING": ("ascii", "latin-1"),
    "TOKENIZERS_PARALLELISM": ("maybe",),
    "SLURM_JOB_NODELIST": ("", "a[1-", "a[1-99999999]"),
    "SLURM_JOB_ID": ("x",),
}
_SETS: dict[str, dict[str, str]] = {
    "one rank of torchrun": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    "one task of Slurm": {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"},
    "Slurm without a task": {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"},
}
_REFUSED: dict[str, dict[str, str]] = {
    "WORLD_SIZE alone": {"WORLD_SIZE": "2"},
    "RANK beyond": {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "RANK without WORLD_SIZE": {"RANK": "1"},
    "port is text": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "x", "MASTER_ADDR": "127.0.0.1"},
    "port is huge": {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "99999", "MASTER_ADDR": "127.0.0.1"
    },
    "port is negative": {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "-1", "MASTER_ADDR": "127.0.0.1"
    },
    "no port": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    "local rank is negative": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"},
    "local world is negative": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "-4"},
    "Slurm task is text": {"SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
    "procs is text": {"PET_NPROC_PER_NODE": "many"},
    "procs is zero": {"PET_NPROC_PER_NODE": "0"},
    "nodes is text": {"PET_NNODES": "many"},
}  # fmt: skip
