"""The demo's 01-single-gpu/train-llm.py on flatout."""

import sys

from flatout.compat.distributed_demo import single_gpu

sys.exit(single_gpu())
