from flatout.compat.unsloth.trainer import *  # noqa: F403
