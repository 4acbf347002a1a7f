"""The demo's 02-ddp/train-llm.py on flatout."""

import sys

from flatout_migrate.doors.distributed_demo import main

sys.exit(main("ddp"))
