"""Access to the model hub with a time limit, and with one-sentence errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from flatout.errors import FlatoutError, ResourceError, UsageError, reason_of
from flatout.io.allowed import require_allowed
from flatout.io.near_path import did_you_mean, other_model
from flatout.io.redact import redacted

# whether a model's name is an existing folder; unlike Path.is_dir, False for a name too long for a path
is_folder = os.path.isdir
# a name with one of these endings is a file's, not a hub id
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json", ".jsonl", ".yaml", ".yml", ".csv", ".txt")
# what was found out about the hub counts for at most so long
ASK_EVERY_S = 60.0


def is_path(name: str) -> bool:
    """Whether a name is that of a folder, which may be missing, as no hub id looks like it."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def hub_source(name: str, revision: str | None) -> tuple[str, str | None]:
    """Return a model's folder or hub id and its revision unchanged, or its cached folder if the hub does not answer.

    The hub is tried once a minute, for HF_HUB_ETAG_TIMEOUT seconds (10); its client tries six times and waits minutes.
    Raises UsageError for a folder with an unreadable file, SecurityError as `require_allowed`, and as `hub_errors` if
    the model is not cached either.
    """
    if is_folder(name):
        require_allowed(name, is_model=True)
        files = [file for file in Path(name).iterdir() if file.suffix in (".json", ".jinja", ".safetensors")]
        if odd := [file for file in files if not file.is_file()]:
            # transformers would silently ignore such a file
            raise UsageError(f"{odd[0]} is a folder or a broken link; download or copy it again")
        return name, revision
    if name.endswith(_FILE_ENDINGS) or name.startswith((".", "/", "~")):
        raise UsageError(
            f"there is no folder {name}; a model is a folder with config.json, or a hub id such as Qwen/Qwen3-0.6B"
            f"{'; a GGUF file cannot be trained: name the model that it was made of' if name.endswith('.gguf') else ''}"
            f"{other_model(name)}"
        )
    from huggingface_hub import constants, snapshot_download

    if _answers(constants.ENDPOINT, int(time.monotonic() // ASK_EVERY_S)):
        return name, revision
    with hub_errors(name):
        return snapshot_download(name, revision=revision, local_files_only=True), None


@lru_cache(maxsize=1)
def _answers(endpoint: str, period: int) -> bool:
    """Ask once in each period of ASK_EVERY_S whether the hub answers: a start asks for a dozen files and more."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the version that this client uses

    try:
        get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL, OfflineModeIsEnabled):
        return False
    return True


def hub_file(name: str, file: str, revision: str | None) -> Path | None:
    """Return a model's file from its folder, the hub's cache or a download; None if absent. Raises as `hub_source`."""
    source, revision = hub_source(name, revision)
    if (folder := Path(source)).is_dir():
        return folder / file if (folder / file).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with hub_errors(name, is_hub_alone=True):
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except RemoteEntryNotFoundError:
            # not its LocalEntryNotFoundError, which stands for any answer but this one, a 503 too
            return None


@contextmanager
def hub_errors(
    name: str, what: str = "", *, is_hub_alone: bool = False, within_s: float = 0.0, secrets: Sequence[str] = ()
) -> Iterator[None]:
    """Turn failures of the hub's client into one sentence without `secrets` that begins with `what`: no such folder.

    With `is_hub_alone` nothing but the client runs in the block, so what it makes of JSON of another form counts, too.
    `within_s` is how long it waits. Raises UsageError when the hub has no such model or revision, denies access, or is
    disabled (HF_HUB_OFFLINE), and ResourceError when it does not answer, or with an error of its own.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # as above

    odd = (ValueError, TypeError, LookupError, AttributeError, RuntimeError) if is_hub_alone else ()
    client = (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, httpx.InvalidURL)
    hint = "" if what or is_folder(name) else did_you_mean(name, is_folder=True)
    if "$" in name:
        hint = (
            "; files have no variables: write the name itself, or give it on the command line, where shells have them"
        )
    what = what or f"there is no folder {name}, and"
    try:
        yield
    except HFValidationError as error:
        end = hint or ("" if is_hub_alone else other_model(name))
        raise UsageError(f"{what} it is not a hub id such as Qwen/Qwen3-0.6B{end}") from error
    except (*client, *odd) as error:
        explained = _explained(error, within_s)
        raise type(explained)(f"{what} {redacted(explained.text, secrets)}{hint}") from error


def _explained(error: Exception, within_s: float) -> FlatoutError:
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # as above

    # a file that is not in the cache, and an upload that failed, are only what follows from the hub's answer
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError | RuntimeError) else None
    cause = error if cause is None else cause
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    if 400 <= status < 500 and status != 429:
        # without the client's link to a page about the status
        lines = [line for line in str(cause).splitlines() if line and not line.startswith("For more info")]
        remedies = {401: "a valid one, with access to it", 403: "one with access to it"}
        remedy = f"; set HF_TOKEN to {remedies[status]}" if status in remedies else ""
        return UsageError(f"the hub rejects it ({status}): {lines[-1]}{remedy}")
    if constants.HF_HUB_OFFLINE or isinstance(cause, OfflineModeIsEnabled):
        return UsageError("HF_HUB_OFFLINE is set and it is not in the hub cache; correct the name, or go online")
    if status:
        return ResourceError(f"{constants.ENDPOINT} answers with an error ({status}); try again in a few minutes")
    if isinstance(cause, FileMetadataError) or not isinstance(cause, LocalEntryNotFoundError | httpx.HTTPError):
        problem = f"does not answer as a hub does ({reason_of(cause)})"
        return ResourceError(f"{constants.ENDPOINT} {problem}; check HF_ENDPOINT")
    limit = f"{within_s:g} s" if within_s else f"{constants.HF_HUB_ETAG_TIMEOUT} s (HF_HUB_ETAG_TIMEOUT)"
    return ResourceError(f"{constants.ENDPOINT} does not answer within {limit}; correct the name, or try again")
