"""Turbo-Tune's training script, run by flatout; start it with torchrun, accelerate or deepspeed."""

import sys

from flatout_migrate.doors.turbo_tune import main

sys.exit(main())
