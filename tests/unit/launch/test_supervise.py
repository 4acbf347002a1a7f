"""Pieces of the watch over an attempt that need no processes."""

import io
from pathlib import Path

from flatout.launch.command import Attempt
from flatout.launch.nodes import Nodes
from flatout.launch.place import Start
from flatout.launch.supervise import Follower, new_attempt, with_fewer


def test_fewer_ranks_only_where_allowed() -> None:
    attempt = Attempt(Start("3", Nodes(), ("4", "5", "6")), ["train"], "run")
    assert with_fewer(attempt, 1, None) is attempt
    assert with_fewer(attempt, 1, 3) is attempt
    assert with_fewer(attempt, 1, 2).start == Start("2", Nodes(), ("4", "6"))
    alone = Attempt(Start("1", Nodes()), ["train"], "run")
    assert with_fewer(alone, 0, 1) is alone
    many_nodes = Attempt(Start("3", Nodes(2, 2, 0, "h:1")), ["train"], "run")
    assert with_fewer(many_nodes, 1, 1) is many_nodes


def test_attempts_are_numbered_on_and_the_latest_is_pointed_to(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for number in range(11):
        assert new_attempt(logs).name == f"attempt-{number}"
        assert (logs / "latest").resolve() == (logs / f"attempt-{number}").resolve()


def test_a_log_is_copied_line_by_line(tmp_path: Path) -> None:
    out = io.StringIO()
    path = tmp_path / "rank-0.log"
    follower = Follower(path, out)
    follower.copy()
    with path.open("wb") as file:
        for piece in (b"one\ntw", "o\nzw\u00f6".encode()[:-1], "\u00f6".encode()[-1:] + b"lf\n"):
            file.write(piece)
            file.flush()
            follower.copy()
    assert out.getvalue() == "one\ntwo\nzw\u00f6lf\n"
