"""Compares training on pictures with transformers and PEFT, family by family, and writes the table of docs/pictures.md.

    python benchmarks/picture_table.py

Runs tests/parity/test_picture_steps.py in all its forms, in minutes. SmolVLM needs `pip install num2words`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TEST, PAGE = "tests/parity/test_picture_steps.py", ROOT / "docs" / "pictures.md"
HEAD = "| model type | layout | largest difference of a loss |\n|---|---|---|\n"


def measured(report: Path) -> dict[str, dict[str, float]]:
    """Each family's largest relative difference by layout; a family whose test was skipped has none.

    Raises:
        SystemExit: a family is not exact.
    """
    found: dict[str, dict[str, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"picture_table: {case.get('name')} failed")
        values = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        if "difference" in values:
            found.setdefault(values["family"], {})[values["layout"]] = float(values["difference"])
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [
        f"| {family} | {' and '.join(layouts)} | {max(layouts.values()):.0e} |"
        for family, layouts in sorted(found.items())
    ]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", TEST, "-m", "exhaustive or not exhaustive", f"--junitxml={report}"]
        subprocess.run([*command, "-o", "junit_family=xunit1"], cwd=ROOT, check=False)
        found = measured(report)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda match: table(found), page))
    print(f"{len(found)} families in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
