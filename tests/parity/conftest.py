"""Shared by the parity tests: their folder is importable (tiny_models), and our attention is registered once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def registered_attention():
    from tiny_models import register_truth

    from flatout.models.attention import register

    register()
    register_truth()
