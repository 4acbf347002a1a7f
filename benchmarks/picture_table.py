"""Compares training on pictures with transformers and PEFT, family by family, and writes the table of docs/pictures.md.

    python benchmarks/picture_table.py

Runs tests/parity/test_picture_steps.py and test_tower_steps.py in all their forms, in 5 minutes on two cores. SmolVLM
needs `pip install num2words`; without it, the table stays as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS, PAGE = [f"tests/parity/test_{name}_steps.py" for name in ("picture", "tower")], ROOT / "docs" / "numerics.md"
HEAD = (
    "| model type | layout | LoRA of the decoder, 4 steps | LoRA with the tower, 10 steps | full, 10 steps |\n"
    "|---|---|---|---|---|\n"
)


def measured(report: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Each family's largest relative differences by column and layout.

    Raises:
        SystemExit: a family is not exact, or was not measured.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"picture_table: {case.get('name')} failed")
        if (skipped := case.find("skipped")) is not None:
            sys.exit(f"picture_table: {case.get('name')} was skipped: {skipped.get('message')}")
        values = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        if "difference" in values:
            columns = found.setdefault(values["family"], {})
            columns.setdefault(values.get("method", "decoder"), {})[values["layout"]] = float(values["difference"])
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for family, columns in sorted(found.items()):
        cells = [
            f"{max(columns[name].values()):.0e}" if name in columns else "" for name in ("decoder", "lora", "full")
        ]
        lines.append(f"| {' | '.join((family, ' and '.join(columns['decoder']), *cells))} |\n")
    return HEAD + "".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        forms = ["-k", "plain_loop", "-m", "exhaustive or not exhaustive", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *TESTS, *forms, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False)
        found = measured(report)
    page = PAGE.read_text()
    if HEAD not in page:
        sys.exit(f"picture_table: {PAGE.name} has no table with this head:\n{HEAD}")
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda match: table(found), page))
    print(f"{len(found)} families in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
