from flatout.compat.unsloth import *  # noqa: F403
