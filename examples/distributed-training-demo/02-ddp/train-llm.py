"""The demo's 02-ddp/train-llm.py on flatout."""

import sys

from flatout_frontdoors.distributed_demo import main

sys.exit(main("ddp"))
