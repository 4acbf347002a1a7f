"""Pieces of the watch over an attempt that need no processes."""

import io

from flatout.launch.launch_mode import Nodes, SpawnRanks
from flatout.launch.supervise import copy_lines, new_attempt, with_fewer


def test_fewer_ranks_only_where_allowed():
    start = SpawnRanks(3, Nodes(), ("4", "5", "6"))
    assert with_fewer(start, 1, None) is start
    assert with_fewer(start, 1, 3) is start
    assert with_fewer(start, 1, 2) == SpawnRanks(2, Nodes(), ("4", "6"))
    assert with_fewer(SpawnRanks(2, Nodes()), 0, 1) == SpawnRanks(1, Nodes())
    alone = SpawnRanks(1, Nodes())
    assert with_fewer(alone, 0, 1) is alone
    many_nodes = SpawnRanks(3, Nodes(2, 2, 0, "h:1"))
    assert with_fewer(many_nodes, 1, 1) is many_nodes


def test_attempts_are_numbered_on_and_the_latest_is_pointed_to(tmp_path):
    logs = tmp_path / "logs"
    for number in range(11):
        assert new_attempt(logs).name == f"attempt-{number}"
        assert (logs / "latest").resolve() == (logs / f"attempt-{number}").resolve()


def test_a_log_is_copied_line_by_line(tmp_path):
    out = io.StringIO()
    path = tmp_path / "rank-0.log"
    copied = copy_lines(path, out, 0)
    with path.open("wb") as file:
        for piece in (b"one\ntw", "o\nzw\u00f6".encode()[:-1], "\u00f6".encode()[-1:] + b"lf\n"):
            file.write(piece)
            file.flush()
            copied = copy_lines(path, out, copied)
    assert out.getvalue() == "one\ntwo\nzw\u00f6lf\n"
