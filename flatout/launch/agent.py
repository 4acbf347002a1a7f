"""torch's elastic launcher, told to stop when the process that started it dies: `python -m` this module PID WORDS."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become `python -m` WORDS, which gets SIGTERM from the kernel once its parent, PID, is gone.

    The launcher passes that on to its ranks, which save and stop: a supervisor that was killed leaves no rank behind.
    """
    parent, *words = sys.argv[1:]
    # it outlives becoming another program
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # the parent may have died before the kernel was asked
    if os.getppid() != int(parent):
        sys.exit(128 + signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main()
