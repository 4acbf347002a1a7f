"""The demo's 01-single-gpu/train-llm.py on flatout."""

import sys

from flatout_migrate.doors.distributed_demo import main

sys.exit(main("single-gpu"))
