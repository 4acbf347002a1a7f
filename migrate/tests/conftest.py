"""The tiny world of flatout's tests."""

from tests.conftest import metrics_of as metrics_of
from tests.conftest import plain_torch as plain_torch
from tests.conftest import pytest_collection_finish as pytest_collection_finish
from tests.conftest import tiny as tiny
from tests.conftest import warm_ranks as warm_ranks
