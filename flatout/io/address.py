"""Files at an address: https:// and hf:// through fsspec, s3:// and gs:// through pyarrow's clients.

Each store's client reads its secrets from the environment, as its documents say; nothing here holds one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from flatout.environment import environment
from flatout.errors import DataError, ResourceError, UsageError, install

SCHEMES = ("https", "http", "s3", "gs", "hf")
CONNECT_S, READ_S = 10.0, 30.0
_IDENTITY = {"Accept-Encoding": "identity"}
_BLOCK_BYTES = 8 << 20

_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_REGION",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "hf": "set HF_TOKEN, or run hf auth login",
    "https": "use an address that is signed, or put the server's login into ~/.netrc",
}
# how pyarrow's messages name what the service said
_CODE = re.compile(r"AWS Error (\w+)|google::cloud::Status\((\w+)")
_MISSING = ("NO_SUCH", "NOT_FOUND", "RESOURCE_NOT_FOUND")
_DENIED = ("ACCESS_DENIED", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_", "SIGNATURE", "UNRECOGNIZED_CLIENT")
_CREDENTIALS_LOST = "Could not automatically determine credentials"


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says about a file. `mark` changes with the content ("" if it says nothing); `kind` is what it is."""

    path: str
    size: int | None
    mark: str
    kind: str


class NoRangesError(Exception):
    """The server sends a file only from its start."""


class Store(Protocol):
    """A place with files. All raise what their client raises; `failure` puts it into words."""

    def stat(self, path: str) -> Stat:
        """Return what is known of a file without reading it."""

    def find(self, folder: str) -> list[Stat]:
        """Return all files below a folder."""

    def open_at(self, path: str, offset: int) -> IO[bytes]:
        """Open a file for reading from a byte on. Raises NoRangesError if the store cannot begin there."""


def open_store(scheme: str, path: str) -> tuple[Store, str]:
    """Return the store of an address, and the path by which it knows the file; hub paths are pinned to a commit.

    The hub is asked which one, unless the path is empty. Raises UsageError if a package is missing.
    """
    if scheme in ("http", "https"):
        return _Web(), f"{scheme}://{path}"
    if scheme == "hf":
        return _Hub.pinned(path) if path else (_Hub(), path)
    return _Bucket(scheme, path.partition("/")[0]), path


class _Web:
    def __init__(self) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise UsageError(f"https:// needs {error.name}: {install('remote')}") from error
        from fsspec.implementations.http import HTTPFileSystem  # lazy: with aiohttp, 0.3 s

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
        client = {"timeout": timeout, "trust_env": True}  # proxies and ~/.netrc
        self._files = HTTPFileSystem(client_kwargs=client, headers=_IDENTITY, skip_instance_cache=True)

    def stat(self, path: str) -> Stat:
        facts: Mapping[str, Any] = self._files.info(path)
        if facts.get("mimetype") == "text/html":
            raise DataError("the server sends a web page, not data; give the address of the file itself")
        kind = next((name for name in ("ETag", "Last-Modified") if facts.get(name)), "")
        return Stat(path, facts.get("size"), str(facts.get(kind, "")), kind)

    def find(self, folder: str) -> list[Stat]:
        raise DataError("a web address names one file; folders and patterns are for s3://, gs:// and hf://")

    def open_at(self, path: str, offset: int) -> IO[bytes]:
        headers = _IDENTITY | ({"Range": f"bytes={offset}-"} if offset else {})
        # with a size, the file system does not ask for one again
        file = self._files.open(path, block_size=0, size=1, headers=headers)
        if offset and file.r.status != 206:
            file.close()
            raise NoRangesError
        opened: IO[bytes] = file
        return opened


class _Hub:
    def __init__(self) -> None:
        from huggingface_hub import HfFileSystem

        self._files = HfFileSystem(skip_instance_cache=True)

    @classmethod
    def pinned(cls, path: str) -> tuple[_Hub, str]:
        """Return the hub, and the path with the commit that its revision is now."""
        from huggingface_hub import HfApi, constants

        store = cls()
        resolved: Any = store._files.resolve_path(path)
        if not hasattr(resolved, "repo_type"):
            raise DataError("buckets of the hub have no revisions; use hf://datasets/org/set")
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        facts = HfApi().repo_info(
            resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision, timeout=timeout
        )
        prefix = constants.REPO_TYPES_URL_PREFIXES.get(resolved.repo_type, "")
        return store, f"{prefix}{resolved.repo_id}@{facts.sha}/{resolved.path_in_repo}".rstrip("/")

    def stat(self, path: str) -> Stat:
        facts = self._files.info(path)
        if facts["type"] != "file":
            raise FileNotFoundError(path)
        return self._stat(facts)

    def find(self, folder: str) -> list[Stat]:
        entries: Any = self._files.find(folder, detail=True)
        return [self._stat(facts) for facts in entries.values()]

    def _stat(self, facts: Mapping[str, Any]) -> Stat:
        mark = (facts.get("lfs") or {}).get("sha256") or facts.get("xet_hash") or facts["blob_id"]
        return Stat(facts["name"], facts["size"], str(mark), "hash of its content")

    def open_at(self, path: str, offset: int) -> IO[bytes]:
        file = self._files.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="none")
        file.seek(offset)
        opened: IO[bytes] = file
        return opened


class _Bucket:
    def __init__(self, scheme: str, bucket: str) -> None:
        from pyarrow import fs

        self._files = (_s3 if scheme == "s3" else _gs)(fs, environment(), bucket)

    def stat(self, path: str) -> Stat:
        [facts] = self._files.get_file_info([path])
        if not facts.is_file:
            raise FileNotFoundError(path)
        return self._stat(facts)

    def find(self, folder: str) -> list[Stat]:
        from pyarrow import fs

        entries = self._files.get_file_info(fs.FileSelector(folder.rstrip("/"), recursive=True))
        return [self._stat(facts) for facts in entries if facts.is_file]

    def _stat(self, facts: Any) -> Stat:
        return Stat(facts.path, facts.size, str(facts.mtime_ns), "size and date")

    def open_at(self, path: str, offset: int) -> IO[bytes]:
        file: IO[bytes] = self._files.open_input_file(path)
        file.seek(offset)
        return file


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
        said = f"{status}" if status else code.lower().replace("_", " ")
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
