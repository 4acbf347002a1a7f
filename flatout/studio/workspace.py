"""The workspace: the folder in which studio was started. Requests name files and folders inside it, and no others."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.config.folders import free_folder, is_run_folder
from flatout.config.read import make_config, merge_overrides
from flatout.config.schema import NAME_PATTERN, Config, DataConfig
from flatout.config.section import paths_of
from flatout.data import registry
from flatout.data.rows.read import ROW_TYPES, row_type
from flatout.errors import DataError, ProblemsError, SecurityError, UsageError, reason_of
from flatout.io.durable_io import DurableIO
from flatout.io.file_lock import open_lock, take_lock

UPLOADS = "uploads"
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
    """Raise SecurityError for a configuration that runs code of a file: a person's own objective."""
    if config.objective.path is not None:
        raise SecurityError(
            "objective.path: the file would run as code, which a page may not start; use objective.kind, or start "
            "this run in a terminal: flatout train"
        )


class Workspace:
    """The folder `root` and what may be read and written in it; in the folders `models`, models may be read."""

    def __init__(self, root: Path, models: Sequence[Path] = ()) -> None:
        self.root = root.resolve()
        self.models = tuple(folder.resolve() for folder in models)

    @property
    def data_root(self) -> Path:
        """The folder of the registry and the built data sets."""
        return self.root / DataConfig().root

    def inside(self, path: str, *, is_model: bool = False) -> Path:
        """Return the absolute path, links resolved. Raises SecurityError if it is outside the workspace.

        What `is_model` may be in the folders of models, too.
        """
        try:
            resolved = (self.root / path).resolve()
            # some readers expand ~ to a home folder
            roots = (self.root, *(self.models if is_model else ()))
            if path.startswith("~") or not any(map(resolved.is_relative_to, roots)):
                raise SecurityError(f"{path!r:.200} is outside the workspace {self.root}; choose something inside it")
            with suppress(FileNotFoundError, NotADirectoryError):  # it may be made
                resolved.stat()
        except (OSError, ValueError, RuntimeError) as error:
            raise SecurityError(f"{path!r:.200} is no path in the workspace: {reason_of(error)}") from error
        return resolved

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
            if is_run_folder(folder):
                survey.runs.append(self.relative(folder))
            elif is_model:
                survey.models.append(self.relative(folder))
            elif _MODEL_FILES.isdisjoint(files):
                names = (name for name in files if row_type(Path(name)) and name != registry.FILE_NAME)
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
        first = self.root / "runs" / "run"
        return (free_folder(first) if first.exists() else first).name

    def config(self, settings: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
        """Return the configuration of a form: `settings` by dotted name as text, then `section.name=value` overrides.

        Raises ProblemsError with every wrong setting, and SecurityError for a path outside the workspace, or a person's
        own objective.
        """
        values: dict[str, Any] = {}
        # a list or mapping in a field is YAML, as on the command line
        lines = [f"{name}={value}" for name, value in settings.items() if value[:1] in ("[", "{")]
        for name, value in settings.items():
            *sections, leaf = name.split(".")
            holder = values
            for section in sections:
                holder = holder.setdefault(section, {})
                if not isinstance(holder, dict):
                    raise UsageError(f"{name}: {section} is given as a value too; keep one")
            holder[leaf] = value
        merged, problems = merge_overrides(values, [*lines, *(line.strip() for line in overrides if line.strip())])
        if problems:
            raise ProblemsError("settings", problems)
        if isinstance(file := merged.get("deepspeed"), str):
            self.inside(file)  # before it is read
        config = make_config(merged, origin="settings", folder=self.root)
        require_no_code(config)
        models = {config.model.name, config.data.tokenizer}
        for path in (str(config.folder), *paths_of(config)):
            self.inside(path, is_model=path in models)  # a hub id, read as a path, is inside
        return config

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
        for left in folder.glob(".*.part"):
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
