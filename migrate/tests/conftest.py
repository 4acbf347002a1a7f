"""The tiny world of flatout's tests."""

import importlib.metadata
from collections.abc import Iterator
from functools import cache

import pytest

from tests.conftest import metrics_of as metrics_of
from tests.conftest import plain_torch as plain_torch
from tests.conftest import pytest_collection_finish as pytest_collection_finish
from tests.conftest import tiny as tiny
from tests.conftest import warm_ranks as warm_ranks


@pytest.fixture(scope="module", autouse=True)
def known_entry_points() -> Iterator[None]:
    """What is installed does not change, and finding it again takes half of the time of a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", cache(importlib.metadata.entry_points))
        yield
