from flatout.compat.trl import *  # noqa: F403
