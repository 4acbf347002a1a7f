"""The workspace: the folder in which studio was started. Requests name files and folders inside it, and no others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from flatout.api.data import REGISTRY, ROW_TYPES, own_paths, row_type
from flatout.api.runs import RUN_NAME, free_folder, is_run_folder
from flatout.api.settings import (
    NAME_PATTERN,
    Config,
    DataConfig,
    load_config,
    load_values,
    make_config,
    paths_of,
    with_overrides,
)
from flatout.environment import STUDIO_FOLDERS, environment
from flatout.errors import DataError, SecurityError, UsageError
from flatout.io.allowed import require_below, require_contained
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import open_lock, take_lock

UPLOADS, TRASH = "uploads", ".trash"
MAX_UPLOAD_BYTES = 2 << 30
# how far below the workspace files are offered, and of how many entries
MAX_DEPTH, MAX_ENTRIES = 4, 20_000
# folders of many files of which none is for a person to pick
_SKIPPED = {"built_dataset", "checkpoints", "logs", "node_modules", "__pycache__", "site-packages"}
_MODEL_FILES = {"config.json", "tokenizer.json", "adapter_config.json"}


@dataclass
class Survey:
    """What the workspace holds, as paths relative to it. `is_complete` is False if there was too much to look at."""

    data_files: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    is_complete: bool = True


def require_no_code(config: Config) -> None:
    """Raise SecurityError for a configuration that runs code of a person's own file, or sends files elsewhere."""
    own = {"objective": config.objective.path, "optim": config.optim.path, "lora.init": config.lora.init_path}
    own |= {f"format of {source.path}": source.converter for source in config.data.sources}
    own |= {f"rollout.rewards {reward.title}": reward.function for reward in config.rollout.rewards}
    own |= {"checkpoint.mirror": config.checkpoint.mirror}
    if where := next((f"{setting}: {path}" for setting, path in own.items() if path is not None), None):
        what = "it would be sent files" if where.startswith("checkpoint") else "the file would run as code"
        raise SecurityError(f"{where}: {what}, which a page may not start; start this run in a terminal: flatout train")


class Workspace:
    """The folder `root` and what may be read and written in it; in the folders `models`, models may be read."""

    def __init__(self, root: Path, models: Sequence[Path] = ()) -> None:
        self.root = root.resolve()
        self.models = tuple(folder.resolve() for folder in models)

    @property
    def data_root(self) -> Path:
        """The folder of the registry and the built data sets. Raises SecurityError if a link leads out of it."""
        root = DataConfig().root
        for path in own_paths(root):
            self.contained(str(path))
        return self.root / root

    def inside(self, path: str, *, is_model: bool = False) -> Path:
        """Return the absolute path, links resolved. Raises SecurityError if it is outside the workspace.

        What `is_model` may be in the folders of models, too.
        """
        if path.startswith("~"):  # some readers expand it to a home folder
            raise SecurityError(f"{path!r:.200} is outside the workspace {self.root}; choose something inside it")
        return require_below(self.root / path, (self.root, *(self.models if is_model else ())))

    def contained(self, path: str, *, is_model: bool = False) -> Path:
        """Return what `inside` does. Raises SecurityError, too, for a folder in which a link leads elsewhere."""
        resolved = self.inside(path, is_model=is_model)
        if resolved.is_relative_to(self.root):  # the folders of models may have links: a person named them
            require_contained(resolved, [self.root])
        return resolved

    def run(self, path: str) -> Path:
        """Return the folder of a run by its name in `survey`.

        Raises SecurityError as `contained`, UsageError for a folder that is no run's, and for a path that goes by a
        link, `..` or the root of the disk.
        """
        if not self._is_run(folder := self.inside(path)) or path != self.relative(folder):
            raise UsageError(f"{path!r:.200} is not the folder of a run; choose one from the list")
        return self.contained(path)

    def run_or_model(self, path: str) -> Path:
        """Return the folder of a run, or of a model or adapter. Raises as `run` does."""
        folder = self.contained(path, is_model=True)
        is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        return folder if is_model else self.run(path)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that read and write only in the workspace."""
        return environment() | {STUDIO_FOLDERS: json.dumps([str(folder) for folder in (self.root, *self.models)])}

    def may_be_run(self, folder: Path) -> bool:
        """Whether a run may have this folder: it is below the workspace, and not hidden, as TRASH is."""
        parts = folder.relative_to(self.root).parts
        return bool(parts) and not any(part.startswith(".") for part in parts)

    def _is_run(self, folder: Path) -> bool:
        return self.may_be_run(folder) and not (folder / RUN_NAME).is_symlink() and is_run_folder(folder)

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def survey(self) -> Survey:
        """Look for data files, model folders and run folders."""
        survey, num_entries = Survey(), 0
        for parent, folders, files in os.walk(self.root):
            num_entries += len(folders) + len(files)
            if num_entries > MAX_ENTRIES:
                survey.is_complete = False
                break
            folder = Path(parent)
            is_model = {"config.json", "tokenizer.json"} <= set(files)
            if RUN_NAME in files and self._is_run(folder):
                survey.runs.append(self.relative(folder))
            elif is_model:
                survey.models.append(self.relative(folder))
            elif _MODEL_FILES.isdisjoint(files):
                names = (name for name in files if row_type(Path(name)) and name != REGISTRY)
                survey.data_files += [self.relative(folder / name) for name in names]
            is_deep = len(folder.relative_to(self.root).parts) >= MAX_DEPTH
            visible = (
                [] if is_model or is_deep else [name for name in folders if name[0] != "." and name not in _SKIPPED]
            )
            folders[:] = sorted(visible)
        survey.data_files.sort()
        for folder in self.models:
            survey.models += [
                str(one) for one in (folder, *sorted(folder.iterdir())) if (one / "config.json").is_file()
            ]
        return survey

    def free_run_name(self) -> str:
        """Return the first of run, run-2, run-3 ... of which there is no folder."""
        return free_folder(self.root / "runs" / "run").name

    def config(self, settings: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
        """Return the configuration of a form: `settings` by dotted name as text, then `section.name=value` overrides.

        Raises ProblemsError with every wrong setting, and SecurityError for a path outside the workspace, or a person's
        own objective.
        """
        values: dict[str, Any] = {}
        # null and a list, mapping or quoted text in a field are YAML, as on the command line
        lines = [f"{name}={value}" for name, value in settings.items() if re.match(r"[\[{'\"]|null$", value)]
        for name, value in settings.items():
            *sections, leaf = name.split(".")
            holder = values
            for section in sections:
                holder = holder.setdefault(section, {})
                if not isinstance(holder, dict):
                    raise UsageError(f"{name}: {section} is given as a value too; keep one")
            holder[leaf] = value
        merged = with_overrides(values, [*lines, *(line.strip() for line in overrides if line.strip())])
        self._require_readable(merged, self.root)
        config = make_config(merged, origin="settings", folder=self.root)
        self.require_inside(config)
        return config

    def read_config(self, file: Path) -> Config:
        """Return the settings in the file of a run. Raises as `load_config`, and SecurityError as `inside`."""
        self._require_readable(load_values(self.inside(str(file))), file.parent)
        return load_config(file)

    def _require_readable(self, values: Mapping[str, Any], folder: Path) -> None:
        if isinstance(file := values.get("deepspeed"), str):
            for path in (file, str(folder / file)):
                self.inside(path)

    def require_inside(self, config: Config) -> None:
        """Raise SecurityError for settings with a path outside the workspace, or a person's own objective."""
        require_no_code(config)
        models, others = {config.model.name, config.data.tokenizer}, paths_of(config)
        for path in (str(config.folder), *map(str, own_paths(config.data.root)), *others):
            # a hub id, read as a path, is inside; data.root may hold a person's files too
            (self.inside if path == str(config.data.root) else self.contained)(path, is_model=path in models)
            if has_magic(path):
                self._require_matches_inside(path)

    def _require_matches_inside(self, pattern: str) -> None:
        parts = Path(pattern).parts
        depth = next(index for index, part in enumerate(parts) if has_magic(part))
        folder = self.inside(str(Path(*parts[:depth])))
        if depth < len(parts) - 1 or parts[-1] == "**":  # which follows links to folders
            require_contained(folder, [self.root], skips_hidden="/." not in pattern)
        for match in glob(pattern, root_dir=self.root, recursive=True):  # noqa: PTH207
            self.contained(match)

    async def receive(self, name: str, content: AsyncIterator[bytes]) -> str:
        """Write an uploaded file to `uploads/` piece by piece; return its path relative to the workspace.

        Raises UsageError for a name that no data file has or that is taken, DataError beyond MAX_UPLOAD_BYTES.
        """
        if re.fullmatch(NAME_PATTERN, name) is None or row_type(Path(name)) is None:
            kinds = ", ".join(ROW_TYPES)
            raise UsageError(
                f"file name {name!r:.100}: use letters, digits, dot, dash and underscore, at most 64, and one of the "
                f"endings {kinds} (also with .gz, .xz, .bz2 or .zst); rename the file"
            )
        folder, durable_io = self.inside(UPLOADS), DurableIO()
        durable_io.make_dir(folder)
        path, partial, num_bytes = folder / name, folder / f".{secrets.token_hex(8)}.part", 0
        taken = f"{UPLOADS}/{name} already exists; rename the file, or pick it from the list"
        if path.exists():
            raise UsageError(taken)
        for left in folder.glob(f".{'[0-9a-f]' * 16}.part"):
            with os.fdopen(open_lock(left)) as file:
                if take_lock(file.fileno(), left):  # else another upload still writes it
                    durable_io.remove_tree(left)
        try:
            with durable_io.open_new(partial) as file, durable_io.resource_errors("write", partial):
                take_lock(file.fileno(), partial)
                async for chunk in content:
                    num_bytes += len(chunk)
                    if num_bytes > MAX_UPLOAD_BYTES:
                        limit = f"{MAX_UPLOAD_BYTES >> 30} GiB"
                        raise DataError(f"{name} is larger than {limit}; copy it into the workspace instead")
                    file.write(chunk)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            try:
                path.touch(exist_ok=False)  # another upload of this name may have ended first
            except FileExistsError as error:
                raise UsageError(taken) from error
            await asyncio.to_thread(durable_io.rename, partial, path)
        finally:
            durable_io.remove_tree(partial)
        return self.relative(path)
