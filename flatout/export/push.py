"""Push a run's adapter or merged model to the hub as one commit, with a model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.checkpoint.manifest import verify_final
from flatout.errors import Fix, UsageError
from flatout.export.card import loss_svg, model_card
from flatout.io.durable_io import DurableIO
from flatout.io.hub import hub_errors, is_path
from flatout.models.export import load_merged, publish_model
from flatout.models.load.inference import FINAL_DIR, ModelPaths, resolve_model_paths
from flatout.models.lora.adapter_file import ADAPTER_CONFIG
from flatout.models.stops import saved_stops
from flatout.track.run_log import RunLog, read_run

# a question about a name or a repository is answered at once; a commit of thousands of files is made first
ASKED_S, COMMITTED_S = 15.0, 60.0


def push(
    run_dir: Path,
    repo: str,
    *,
    merged: bool = False,
    private: bool = False,
    base: str | None = None,
    results: str = FINAL_DIR,
    replace: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> str:
    """Push a run's results to a new repository of the hub, or over an existing one with `replace`; return its address.

    The token is the hub client's: HF_TOKEN, or that of `hf auth login`. `base` is the base model's name on the hub, for
    an adapter that was trained from a folder. `on_phase` is told what is awaited. Raises UsageError for a repository
    that exists, a wrong name or token, ResourceError if the hub does not answer, CheckpointError for damaged results.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    trained, log = resolve_model_paths(str(run_dir), results=results), read_run(run_dir)
    folder = trained.adapter or Path(trained.base)
    results_files = verify_final(folder).files
    is_adapter = trained.adapter is not None and not merged
    name = base or trained.base
    if is_adapter and (Path(name).exists() or is_path(name)):
        raise UsageError(
            f"the adapter's base model is the folder {name}, which others do not have",
            [Fix({"--base": "ORG/NAME"}, "its name on the hub"), Fix({"--merged": True}, "the whole model")],
        )
    if merged and trained.adapter is None:
        raise UsageError(f"merged: {run_dir} has no adapter to merge; leave it out")
    if (token := get_token()) is None:
        raise UsageError("there is no token for the hub; set HF_TOKEN to one with write access, or run `hf auth login`")
    api, durable_io, scratch = HfApi(), DurableIO(), run_dir / ".push.tmp"
    on_phase("asking the hub")
    with _bounded(repo, token, ASKED_S):
        repo, parent, old_files = _look_at(api, repo, private=private, replace=replace)
    try:
        files = _files_of(log, repo, trained, name, list(results_files), scratch if merged else None, on_phase)
        changes: list[Any] = [CommitOperationAdd(path, content) for path, content in sorted(files.items())]
        changes += [CommitOperationDelete(path) for path in old_files if path not in files]
        on_phase("uploading to the hub")
        if parent is None:
            with _bounded(repo, token, ASKED_S):
                api.create_repo(repo, private=private)
        with _bounded(repo, token, COMMITTED_S):
            done = api.create_commit(repo, changes, commit_message=f"Upload {run_dir.name}", parent_commit=parent)
    finally:
        durable_io.remove_tree(scratch)
    return f"{api.endpoint}/{repo} ({len(files)} files, commit {done.oid[:8]})"


def _files_of(
    log: RunLog,
    repo: str,
    trained: ModelPaths,
    base: str,
    results: list[str],
    merged: Path | None,
    on_phase: Callable[[str], None],
) -> dict[str, Any]:
    """Return what is pushed, by name: results, or the model merged in the folder `merged`; the card and its image."""
    folder = trained.adapter or Path(trained.base)
    files: dict[str, Any] = {file: folder / file for file in results}
    stops = None
    if merged is not None:
        on_phase("merging the adapter")
        model, tokenizer, _ = load_merged(trained)
        publish_model(model, tokenizer, merged)
        files = {path.name: path for path in merged.iterdir()}
    elif trained.adapter is not None:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config |= {"base_model_name_or_path": base, "revision": trained.revision}
        files[ADAPTER_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
        stops = saved_stops(folder)
    files["README.md"] = model_card(log, repo, base, trained, stops=stops).encode()
    if curve := loss_svg(log):
        files["loss.svg"] = curve.encode()
    return files


def _look_at(api: Any, repo: str, *, private: bool, replace: bool) -> tuple[str, str | None, list[str]]:
    """Return the repository's full name, and its newest commit and files if it exists. Raises UsageError."""
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils._validators import validate_repo_id

    validate_repo_id(repo)
    user = api.whoami()["name"]
    repo = repo if "/" in repo else f"{user}/{repo}"
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        return repo, None, []
    files = [file.rfilename for file in info.siblings or [] if file.rfilename != ".gitattributes"]
    if files and not replace:
        raise UsageError(f"{repo} exists and has {len(files)} files; choose another name", [Fix({"--replace": True})])
    if private and not info.private:
        raise UsageError(f"private: {repo} exists and is public; make it private on the hub, or choose another name")
    return repo, info.sha, files


@contextmanager
def _bounded(repo: str, token: str, answer_s: float) -> Iterator[None]:
    """Wait `answer_s` for each answer of the hub: by itself, its client waits without end. Raises as `hub_errors`."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the version that this client uses

    client, unbounded = get_session(), get_session().timeout
    client.timeout = httpx.Timeout(answer_s, connect=constants.HF_HUB_ETAG_TIMEOUT)
    try:
        what = f"{repo!r:.100} was not pushed:"
        with hub_errors(repo, what, is_hub_alone=True, within_s=answer_s, secrets=[token]):
            yield
    finally:
        client.timeout = unbounded
