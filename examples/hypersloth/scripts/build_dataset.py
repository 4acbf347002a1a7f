"""HyperSloth's documented script: `python scripts/build_dataset.py mlabonne/FineTome-100k -n 50000 ...`."""

import sys

from flatout_migrate.doors.hypersloth_commands import build_dataset

sys.exit(build_dataset())
