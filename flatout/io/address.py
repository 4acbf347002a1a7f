"""File systems of fsspec for addresses: https:// and hf:// by its own, s3:// and gs:// by pyarrow's clients.

Each store's client reads its secrets from the environment, as its documents say; nothing here holds one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import get_filesystem_class
from fsspec.spec import AbstractFileSystem

from flatout.environment import environment
from flatout.errors import DataError, ResourceError, UsageError, first_line, needs_extra

SCHEMES = ("https", "http", "s3", "gs", "hf")
CONNECT_S, READ_S = 10.0, 30.0
_Found = TypeVar("_Found")

_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_REGION",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "hf": "set HF_TOKEN, or run hf auth login",
    "https": "use an address that is signed, or put the server's login into ~/.netrc",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "file": "check the permissions of the folder",
}
# how pyarrow's messages name what the service said
_CODE = re.compile(r"AWS Error (\w+)|google::cloud::Status\((\w+)")
_MISSING = ("NO_SUCH", "NOT_FOUND", "RESOURCE_NOT_FOUND")
_DENIED = ("ACCESS_DENIED", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_", "SIGNATURE", "UNRECOGNIZED_CLIENT")
_CREDENTIALS_LOST = "Could not automatically determine credentials"


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says about a file."""

    path: str
    """The name by which the store knows it."""
    size: int | None
    """Its bytes; None if the store does not say."""
    mark: str
    """What changes with its content; "" if the store says nothing."""
    kind: str
    """What `mark` is."""


def open_filesystem(scheme: str, path: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address, and the path by which it knows the file; hub paths are pinned to a commit.

    The hub is asked which one, unless the path is empty. Raises UsageError if a package is missing.
    """
    if scheme in ("http", "https"):
        return _web(), f"{scheme}://{path}"
    if scheme == "hf":
        return _hub(path)
    from pyarrow import fs

    connect = _s3 if scheme == "s3" else _gs
    return _Bucket(connect(fs, environment(), path.partition("/")[0]), skip_instance_cache=True), path


def open_store(address: str) -> AbstractFileSystem:
    """Return what is below an address as a file system to write to. Raises UsageError if a package is missing."""
    scheme, _, path = address.partition("://")
    if scheme in ("s3", "gs"):
        return DirFileSystem(path, open_filesystem(scheme, path)[0])
    try:
        kind = get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        ways = "use s3://, gs:// or file://, or az:// with the package adlfs"
        raise UsageError(f"{address}: {first_line(error)}; {ways}") from error
    options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
    return DirFileSystem(kind._strip_protocol(address), kind(skip_instance_cache=True, **options))


def asked(
    name: str, address: str, *, what: str, log: Callable[[str], None], ask: Callable[[], _Found], attempts: int = 3
) -> _Found:
    """Return what a store answers; one that fails is asked again, after a pause that doubles.

    Raises UsageError, and DataError or ResourceError with `name` as `failure` does; only the latter is tried again.
    """
    for attempt in range(1, attempts + 1):
        try:
            return ask()
        except UsageError:
            raise
        except Exception as error:  # each client has errors of its own; `failure` names them
            reason = failure(error, address.partition(":")[0])
            if isinstance(reason, DataError) or attempt == attempts:
                raise type(reason)(f"{name}: {reason}") from error
            log(f"{name}: {str(reason).partition(';')[0]}; asking again to {what} it")
            time.sleep(2 ** (attempt - 1) - 1)
    raise AssertionError("unreachable")


def stat_of(facts: Mapping[str, Any]) -> Stat:
    """Return what the `info` of a file system says of a file. Raises FileNotFoundError for a folder."""
    if facts["type"] != "file":
        raise FileNotFoundError(facts["name"])
    if facts.get("mimetype") == "text/html":
        raise DataError("the server sends a web page, not data; give the address of the file itself")
    in_hub = (facts.get("lfs") or {}).get("sha256") or facts.get("xet_hash") or facts.get("blob_id")
    changed = facts.get("mtime")
    marks = {
        "hash of its content": in_hub,
        "size and date": changed and str(round(changed.timestamp() * 1e6) * 1000),
        **{name: facts.get(name) for name in ("ETag", "Last-Modified")},
    }
    kind = next((kind for kind, mark in marks.items() if mark), "")
    return Stat(facts["name"], facts.get("size"), str(marks.get(kind, "")), kind)


def _web() -> AbstractFileSystem:
    with needs_extra("https://", "remote"):
        import aiohttp
    from fsspec.implementations.http import HTTPFileSystem  # lazy: with aiohttp, 0.3 s

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
    client = {"timeout": timeout, "trust_env": True}  # proxies and ~/.netrc
    return HTTPFileSystem(client_kwargs=client, headers={"Accept-Encoding": "identity"}, skip_instance_cache=True)


def _hub(path: str) -> tuple[AbstractFileSystem, str]:
    """Return the hub, and the path with the commit that its revision is now."""
    from huggingface_hub import HfApi, HfFileSystem, constants

    files = HfFileSystem(skip_instance_cache=True)
    if not path:
        return files, path
    resolved: Any = files.resolve_path(path)
    if not hasattr(resolved, "repo_type"):
        raise DataError("buckets of the hub have no revisions; use hf://datasets/org/set")
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    facts = HfApi().repo_info(
        resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision, timeout=timeout
    )
    prefix = constants.REPO_TYPES_URL_PREFIXES.get(resolved.repo_type, "")
    return files, f"{prefix}{resolved.repo_id}@{facts.sha}/{resolved.path_in_repo}".rstrip("/")


class _Bucket(ArrowFSWrapper):  # type: ignore[misc]  # fsspec is untyped
    """A bucket, whose files are listed in one request."""

    def find(self, path: str, *_: Any, **__: Any) -> dict[str, dict[str, Any]]:
        """Return what is known of all files below a folder."""
        from pyarrow import fs

        entries = self.fs.get_file_info(fs.FileSelector(path.rstrip("/"), allow_not_found=True, recursive=True))
        return {entry.path: self._make_entry(entry) for entry in entries if entry.is_file}


def _s3(fs: Any, env: Mapping[str, str], bucket: str) -> Any:
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    if region is None and not endpoint and not env.get("AWS_PROFILE"):
        try:
            region = fs.resolve_s3_region(bucket)
        except OSError:  # it does not say; the client's own default then
            region = None
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=3)
    times = {"connect_timeout": CONNECT_S, "request_timeout": READ_S}
    return fs.S3FileSystem(region=region, endpoint_override=endpoint, retry_strategy=retries, **times)


def _gs(fs: Any, env: Mapping[str, str], bucket: str) -> Any:
    times = {"retry_time_limit": timedelta(seconds=READ_S)}
    if emulator := env.get("STORAGE_EMULATOR_HOST"):
        url = urlsplit(emulator if "://" in emulator else f"http://{emulator}")
        return fs.GcsFileSystem(anonymous=True, endpoint_override=url.netloc, scheme=url.scheme, **times)
    files = fs.GcsFileSystem(**times)
    try:
        files.get_file_info([bucket])
    except OSError as error:
        if _CREDENTIALS_LOST in str(error):  # a public bucket needs none
            return fs.GcsFileSystem(anonymous=True, **times)
    return files


def failure(error: BaseException, scheme: str) -> DataError | ResourceError:
    """Put a client's error into words that follow "ADDRESS: ": DataError if the address is at fault, or ResourceError.

    The client's own text is not repeated where it may name the address, whose query can hold a signature.
    """
    if isinstance(error, DataError | ResourceError):
        return error
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # fsspec hides every answer in these
        error = error.__cause__
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status is None and (named := re.search(r"HTTP status (\d+)", str(error))):
        status = int(named[1])
    match = _CODE.search(str(error))
    code = (match[1] or match[2] or "") if match else ""
    is_missing = isinstance(error, FileNotFoundError) or "No such file" in str(error) or "not exist" in str(error)
    if status in (404, 410) or is_missing or code.startswith(_MISSING):
        hint = "; a private one looks the same without a login: " + _CREDENTIALS["hf"] if scheme == "hf" else ""
        return DataError(f"nothing is there; check the address{hint}")
    if status in (401, 403) or isinstance(error, PermissionError) or code.startswith(_DENIED):
        said = f"{status}" if status else code.lower().replace("_", " ") or "by its permissions"
        return DataError(f"access is denied ({said}); {_CREDENTIALS.get(scheme, _CREDENTIALS['https'])}")
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        return DataError(f"the server refuses to send it ({status}); check the address")
    reason = f"the server failed ({status})" if status else _what_happened(error, code)
    return ResourceError(f"{reason}; check the network and run the command again")


def _what_happened(error: BaseException, code: str) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer within {READ_S:g} s"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"ClientPayloadError", "ServerDisconnectedError", "IncompleteRead", "RemoteProtocolError"}:
        return "the connection was cut"
    if names & {"ClientConnectorError", "ConnectError", "ConnectionError", "ClientOSError"}:
        return "no connection to the server"
    if code:
        detail = re.search(r"curlCode: \d+, ([^;]+)", str(error))
        return (detail[1] if detail else code.lower().replace("_", " ")).strip()
    return type(error).__name__
