"""Starts a Python process that goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.io.durable_io import open_own


def start_python(words: Sequence[str], log: Path, *, append: bool = True, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python WORDS` in a session of its own, which no Ctrl-C in this terminal reaches, with its output in `log`.

    `options` are of Popen. Raises OSError, and SecurityError for a log that is a link.
    """
    output = open_own(log, os.O_WRONLY | (os.O_APPEND if append else os.O_TRUNC))
    try:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
    finally:
        os.close(output)
