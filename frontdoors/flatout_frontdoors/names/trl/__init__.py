from flatout.compat.unsloth.trl import *  # noqa: F403
