from flatout.compat.unsloth.models import *  # noqa: F403
