"""The fuzz's line in the summary of a run."""

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, counts in getattr(report, "user_properties", ()):
                if name == "fuzz" and report.when == "call":
                    found.update(counts)
    if found:
        kinds = ("cases", "tracebacks", "accepted-wrong", "unclear")
        terminalreporter.write_line("fuzz: " + ", ".join(f"{found[kind]:,} {kind}" for kind in kinds))
