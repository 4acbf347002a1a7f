"""Names that may stand once only are compared in time that grows with their number, not with its square."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.config.data import SourceConfig
from flatout.config.read import make_config
from flatout.data.rows.sources import open_source
from flatout.errors import DataError, ProblemsError
from flatout.io.json_file import JSONSyntaxError, parse_json

MANY = 100_000
NAMES = [f"name{number}" for number in range(MANY)]


def new_tokens(names: list[str], folder: Path) -> Any:
    return make_config({"model": {"name": "m"}, "data": {"new_tokens": names}}).data.new_tokens


def json_keys(names: list[str], folder: Path) -> Any:
    return parse_json("{" + ",".join(f"{json.dumps(name)}: 1" for name in names) + "}")


def csv_columns(names: list[str], folder: Path) -> Any:
    file = folder / "rows.csv"
    file.write_text(",".join(names) + "\n" + ",".join("1" * len(names)) + "\n")
    (row,) = open_source(SourceConfig(path=str(file))).rows()
    return row.columns


@pytest.mark.parametrize(
    ("read", "error"), [(csv_columns, DataError), (new_tokens, ProblemsError), (json_keys, JSONSyntaxError)]
)
def test_one_repeated_name_among_many_is_found_at_once(read, error, tmp_path):
    started_s = time.process_time()
    assert list(read(NAMES, tmp_path)) == NAMES
    if read is not new_tokens:
        with pytest.raises(error, match="name99999"):
            read([*NAMES, NAMES[-1]], tmp_path)
    # comparing each with all others takes minutes
    assert time.process_time() - started_s < 20
    with pytest.raises(error, match="name9"):
        read([*NAMES[:10], NAMES[9]], tmp_path)
