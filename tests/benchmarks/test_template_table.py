"""Every kind of conversation under our own templates and under public ones: none is trained wrongly in silence.

The referee renders the rows with plain transformers; it uses nothing of flatout but the stored samples.
"""

import re
import shutil
from pathlib import Path

import pytest
from template_table import main

from flatout.data import templates

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"


@pytest.mark.parametrize(
    ("folder", "num_templates", "min_accepted"),
    [
        (Path(templates.__file__).parent, 9, 120),
        pytest.param(
            SHARED, 26, 300,
            marks=[pytest.mark.exhaustive, pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")],
        ),
    ],
)  # fmt: skip
def test_no_template_is_silent_or_wrong(folder, num_templates, min_accepted, tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "all").mkdir()
    for file in sorted(folder.glob("*.jinja")):
        shutil.copy(file, tmp_path / "all")
    monkeypatch.setattr("sys.argv", ["template_table.py", str(tmp_path / "all"), "--tokenizer", str(tiny.model_dir)])
    status, printed = main(), capsys.readouterr().out
    assert status == 0, printed
    assert int(re.search(rf"{num_templates} templates: (\d+) accepted", printed)[1]) > min_accepted
