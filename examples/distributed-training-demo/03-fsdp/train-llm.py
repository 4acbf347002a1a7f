"""The demo's 03-fsdp/train-llm.py on flatout."""

import sys

from flatout_frontdoors.distributed_demo import main

sys.exit(main("fsdp"))
