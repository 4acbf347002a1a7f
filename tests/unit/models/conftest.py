"""Makes the tiny models of tests/parity importable here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
