"""Turbo-Tune's training script on flatout; torchrun, accelerate or deepspeed start it as ranks."""

import sys

from flatout_frontdoors.turbo_tune import main

sys.exit(main())
