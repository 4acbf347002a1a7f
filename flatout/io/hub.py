"""Access to the model hub with a time limit, and with one-sentence errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from flatout.errors import ResourceError, UsageError, first_line
from flatout.io.allowed import require_allowed
from flatout.io.near_path import did_you_mean, other_model

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
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with hub_errors(name):
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except RemoteEntryNotFoundError:
            # not its LocalEntryNotFoundError, which stands for any answer but this one, a 503 too
            return None
        except (TypeError, LookupError, AttributeError) as error:
            # what the client makes of JSON of another form
            problem = f"{constants.ENDPOINT} does not answer as a hub does"
            raise ResourceError(f"there is no folder {name}, and {problem}; check HF_ENDPOINT") from error


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn failures of the hub's client into one sentence with the model or folder.

    Raises UsageError when the hub has no such model or revision, denies access, or is disabled (HF_HUB_OFFLINE), and
    ResourceError when it does not answer, or with an error of its own.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # as above

    hint = "" if is_folder(name) else did_you_mean(name, is_folder=True)
    if "$" in name:
        hint = (
            "; files have no variables: write the name itself, or give it on the command line, where shells have them"
        )
    try:
        yield
    except HFValidationError as error:
        raise UsageError(
            f"there is no folder {name}, and it is not a hub id such as Qwen/Qwen3-0.6B{hint or other_model(name)}"
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, LocalEntryNotFoundError) as error:
        # a file that is not in the cache is only what follows from the hub's answer
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        response, reason = getattr(cause, "response", None), first_line(cause)
        if response is not None and response.status_code < 500 and response.status_code != 429:
            # without the client's link to a page about the status
            reason = [line for line in str(cause).splitlines() if line and not line.startswith("For more info")][-1]
            raise UsageError(f"there is no folder {name}, and the hub rejects it: {reason}{hint}") from error
        if constants.HF_HUB_OFFLINE:
            problem = "HF_HUB_OFFLINE is set and it is not in the hub cache"
            raise UsageError(
                f"there is no folder {name}, and {problem}; correct the path, or go online{hint}"
            ) from error
        if response is not None:
            problem = f"{constants.ENDPOINT} answers with an error ({response.status_code})"
            raise ResourceError(f"there is no folder {name}, and {problem}; try again in a few minutes") from error
        if isinstance(cause, FileMetadataError):
            problem = f"{constants.ENDPOINT} does not answer as a hub does: {reason}"
            raise ResourceError(f"there is no folder {name}, and {problem}; check HF_ENDPOINT") from error
        problem = f"{constants.ENDPOINT} does not answer within {constants.HF_HUB_ETAG_TIMEOUT} s (HF_HUB_ETAG_TIMEOUT)"
        raise ResourceError(
            f"there is no folder {name}, and {problem}; correct the path, or try again{hint}"
        ) from error
