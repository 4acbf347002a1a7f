"""The demo's 03-fsdp/train-llm.py on flatout."""

import sys

from flatout_migrate.doors.distributed_demo import main

sys.exit(main("fsdp"))
