"""Every script can be imported, and what a page quotes beside a figure takes real steps on a CPU."""

import importlib
from pathlib import Path

import numpy as np
import preference
import pytest
import throughput

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in ROOT.joinpath("benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name):
    importlib.import_module(name)


def test_padded_tokens_are_those_of_the_longest_answer_of_a_micro_batch():
    lengths = np.array([[10, 5, 7], [20, 1, 2], [3, 3, 3], [1, 30, 2]])
    assert preference.padded_tokens(lengths, 1) == 2 * (17 + 22 + 6 + 31)
    assert preference.padded_tokens(lengths, 2) == 4 * (22 + 31)


def test_every_command_that_a_page_quotes_names_a_script_with_its_options():
    # the lab's notes also name scripts that never were part of the repository
    pages = [ROOT / "README.md", *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "lab")]
    known = throughput.GROUPS.keys() | throughput.ROWS.keys()
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            for part in line.split("python benchmarks/")[1:]:
                script, *words = part.split("`")[0].split()
                assert (ROOT / "benchmarks" / script).is_file(), f"{page}: {line}"
                if script == "throughput.py" and "--rows" in words:
                    assert set(words[words.index("--rows") + 1].split(",")) <= known, f"{page}: {line}"
