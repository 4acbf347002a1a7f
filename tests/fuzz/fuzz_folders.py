"""What flatout itself wrote and somebody changed: token stores with their registry, and run folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_hostile import damages, mutations
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
        for argv in (by_name, again, show):
            # a damaged store with its rows at hand is built again
            must = "accept" if argv is again else "refuse" if not mutation.path else "either"
            yield case(f"manifest {mutation.name}", argv, f"{_STORE}/manifest.json", mutation.spoil, must, True)
    for mutation in mutations(world.json("data/data_config.json")):
        for argv in (by_name, listing, show):
            must = "refuse" if not mutation.path and mutation.value != [] else "either"
            yield case(f"registry {mutation.name}", argv, "data/data_config.json", mutation.spoil, must, True)
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
        yield case(f"report {mutation.name}", show, f"{_STORE}/report.json", mutation.spoil, "either", True)


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
                yield case(f"{Path(file).name} {mutation.name}", argv, file, mutation.spoil, "either", True)
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
