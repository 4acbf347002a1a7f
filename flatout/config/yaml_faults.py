"""What is wrong with a file that is not valid YAML, in words that say what to write."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from flatout.config.schema import Config
from flatout.errors import UsageError

# part of what PyYAML says -> what a person does
_YAML_FAULTS = {
    "mapping values are not allowed": "begin it as far left as its neighbours, and put a value with `: ` in quotes",
    "an alias": "put a value that begins with * in quotes",
    "end of stream": "close the quote or bracket that begins here",
    "another document": "remove this `---`, a file has the settings of one run",
    "escape": "use single quotes, which keep a backslash as it is",
    "could not find expected ':'": "write a name, a colon and a space before the value",
    "cannot start any token": "put a value that begins with @, ` or % in quotes",
    "expected ',' or": "close the bracket, and separate values by commas",
    "expected <block end>": "begin it as far left as its neighbours",
}


def yaml_fault(error: yaml.YAMLError) -> str:
    """Say on which line a file is not valid YAML, why, and what mends it."""
    problem, mark = str(getattr(error, "problem", None) or error), getattr(error, "problem_mark", None)
    if "quoted scalar" in str(getattr(error, "context", "")) and "end of stream" in problem:
        mark = getattr(error, "context_mark", mark)  # where the quote begins
    if mark is None:
        return f"not valid YAML: {' '.join(problem.split())}"
    whole = f"{getattr(error, 'context', '')} {problem}"
    advice = next((advice for part, advice in _YAML_FAULTS.items() if part in whole), "write `name: value`")
    return f"line {mark.line + 1}: {advice} (not valid YAML: {problem})"


def refuse_line(path: Path, text: str) -> None:
    """Raise UsageError for a line that makes a file invalid YAML, if what is wrong with it is known."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r" *\t", line):
            raise UsageError(
                f"{path}: line {number} begins with a tab; YAML allows only spaces: write two in its place"
            )
        if (match := re.match(r" *([\w.]+) ?=", line)) and match[1].partition(".")[0] in Config.model_fields:
            raise UsageError(f"{path}: line {number}: write `{match[1]}: ` in place of `{match[0].strip()}`")
        if (match := re.match(r" *(\w+):\S", line)) and match[1] in Config.model_fields:
            raise UsageError(f"{path}: line {number}: write a space after `{match[1]}:`")
