"""`flatout studio`: prepare data, plan, train and chat in a browser."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path

from flatout.environment import environment
from flatout.errors import UsageError, needs_extra

DEFAULT_PORT = 8765


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    port = f"port on 127.0.0.1 ({DEFAULT_PORT}); 0: any free one"
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N", help=port)
    models = "a folder outside this one whose models may be read; repeatable"
    parser.add_argument("--models", type=Path, action="append", default=[], metavar="DIR", help=models)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(args: argparse.Namespace) -> None:
    """Serve the current folder until Ctrl-C. Raises UsageError, and ResourceError for a port in use."""
    if not 0 <= args.port < 1 << 16:
        raise UsageError(f"--port is {args.port}; expected a free port such as 8765, at most 65535")
    if lost := next((folder for folder in args.models if not folder.is_dir()), None):
        raise UsageError(f"--models {lost}: there is no such folder; name one that holds model folders")
    with needs_extra("flatout studio", "studio"):
        from flatout.studio.server import serve

    def on_ready(address: str) -> None:
        print(f"flatout studio for {Path.cwd()}\n  {address}", flush=True)
        print("Only this machine can open it. Ctrl-C ends it; runs go on.", flush=True)
        # a browser that is opened should be on the screen of the person who typed the command
        names = environment().keys()
        has_screen = sys.platform == "darwin" or not names.isdisjoint({"DISPLAY", "WAYLAND_DISPLAY"})
        if has_screen and "SSH_CONNECTION" not in names and not args.no_browser:
            page = write_redirect(Path(private), address)
            # in a thread: a browser in the terminal returns only when it is closed
            threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()

    # uvicorn raises SIGTERM again at its end; without a handler, the folder would stay
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="flatout-studio-") as private:
            serve(Path.cwd(), args.port, print, on_ready, args.models)
    finally:
        signal.signal(signal.SIGTERM, before)


def write_redirect(folder: Path, address: str) -> Path:
    """Write a page that leads to `address` and that only this user can read; return its path.

    A browser is opened with this file: other users see the command line of every process, and the address has a token.
    """
    path = folder / "open.html"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}">\n')
    return path
