"""Downloads the pictures that rows give by URL, each once, into a folder that the tokenizing processes read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from flatout.data.conversation import Conversation
from flatout.data.pictures.fetch import DIGEST_BYTES, Web, download_path
from flatout.data.pictures.read import URL
from flatout.errors import DataError
from flatout.io.durable_io import DurableIO

if TYPE_CHECKING:
    from flatout.data.workers import Chunk

AT_ONCE = 32
_TOLD_EVERY_S = 5.0


class Downloads:
    """Downloads the pictures of chunks of rows into a folder. What is whole there stays for a later build.

    A file there is the xxh3-128 of a picture's bytes, and these; or, ending in .failed, why there is none. Nothing is
    synced: after a power cut, the hashes tell what is left.
    """

    def __init__(self, folder: Path, domains: Sequence[str], log: Callable[[str], None]) -> None:
        """Without `domains`, nothing is downloaded and nothing is written."""
        self.folder, self._domains, self._log, self._disk = folder, domains, log, DurableIO()
        self._seen = set[str]()
        self._num_new = self._num_kept = self._num_failed = self._num_bytes = 0

    def ahead(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield chunks with parsed rows, once their pictures are downloaded or have failed. Raises ResourceError."""
        if not self._domains:
            yield from chunks
            return
        self._disk.make_dir(self.folder)
        for path in self.folder.glob("*.failed"):
            self._disk.remove_tree(path)
        web = Web(self._domains)
        pool = ThreadPoolExecutor(AT_ONCE)
        self._logged_s = self._began_s = time.monotonic()
        try:
            for chunk in map(_parsed, chunks):
                urls = set(_urls(chunk)) - self._seen
                self._seen |= urls
                waiting = {pool.submit(self._keep, web, url) for url in sorted(urls)}
                while waiting:
                    done, waiting = wait(waiting, _TOLD_EVERY_S, FIRST_COMPLETED)
                    for one in done:
                        self._count(*one.result(0))
                    self._log_progress()
                yield chunk
        finally:
            web.stop()
            pool.shutdown(cancel_futures=True)

    def notes(self) -> list[str]:
        """Return a line that says how many pictures were downloaded, and how many failed; none without any."""
        if not self._seen:
            return []
        kept = f"; {self._num_kept:,} were there from an earlier build" if self._num_kept else ""
        failed = f"; {self._num_failed:,} URLs failed" if self._num_failed else ""
        return [f"downloaded {self._num_new:,} pictures, {self._num_bytes / 1e6:,.1f} MB{kept}{failed}"]

    def remove(self) -> None:
        """Remove the folder: the set is built, and holds the pictures."""
        self._disk.remove_tree(self.folder)

    def _count(self, size: int | None, is_new: bool) -> None:
        self._num_failed += size is None
        self._num_kept += not is_new
        self._num_new += is_new and size is not None
        self._num_bytes += (size or 0) * is_new

    def _log_progress(self) -> None:
        now_s = time.monotonic()
        # ever more rarely, so that hours of it are no thousand lines
        if now_s - self._logged_s >= max(_TOLD_EVERY_S, 0.1 * (now_s - self._began_s)):
            self._logged_s = now_s
            left = len(self._seen) - self._num_new - self._num_kept - self._num_failed
            self._log(f"{self.notes()[0]}; {left:,} more for the next rows")

    def _keep(self, web: Web, url: str) -> tuple[int | None, bool]:
        """Write a picture, or why there is none, into the folder; return its bytes, and whether they are new."""
        path, size = download_path(self.folder, url), None
        if path.exists():  # of an earlier build, which may have been killed while it wrote
            held = path.read_bytes()
            if held[:DIGEST_BYTES] == xxhash.xxh3_128_digest(held[DIGEST_BYTES:]):
                return len(held) - DIGEST_BYTES, False
            self._disk.remove_tree(path)
        try:
            content = web.read(url)
            held, size = xxhash.xxh3_128_digest(content) + content, len(content)
        except DataError as error:
            failure = [error.text, [(fix.settings, fix.why) for fix in error.fixes]]
            path, held = path.with_suffix(".failed"), json.dumps(failure).encode()
        with self._disk.resource_errors("write", path), self._disk.open_new(path) as file:
            file.write(held)
        return size, True


def _parsed(chunk: Chunk) -> Chunk:
    """Return a chunk with its rows parsed; a bad row stays as it is, and is named where it is tokenized."""
    rows = list(chunk.rows)
    for index, row in enumerate(rows):
        with suppress(DataError):
            rows[index] = chunk.parse(row)
    return replace(chunk, rows=tuple(rows))


def _urls(chunk: Chunk) -> Iterator[str]:
    """Yield the URLs of the pictures of a chunk's parsed rows."""
    for row in chunk.rows:
        values = [picture.value for picture in row.pictures] if isinstance(row, Conversation) else []
        yield from (value for value in values if isinstance(value, str) and URL.match(value))
