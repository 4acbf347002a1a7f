"""The suite is only worth what it catches: every planted bug must make a test fail."""

import pytest
from bugs import BUGS, Bug, is_caught


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    assert is_caught(bug), f"{bug.test} passes with this bug: {bug.name}"
