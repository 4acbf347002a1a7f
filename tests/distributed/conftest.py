"""Ends runs that a failed test leaves behind: they would take the cores of all tests after it."""

import launching
import pytest


@pytest.fixture(autouse=True)
def no_run_left_behind():
    yield
    while launching.STARTED:
        process = launching.STARTED.pop()
        if process.poll() is None:
            # ranks end with their launcher
            process.kill()
            process.wait()
