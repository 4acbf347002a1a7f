"""The demo's 01-single-gpu/train-llm.py on flatout."""

import sys

from flatout_frontdoors.distributed_demo import main

sys.exit(main("single-gpu"))
