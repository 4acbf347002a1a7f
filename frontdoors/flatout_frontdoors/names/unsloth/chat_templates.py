from flatout.compat.unsloth.chat_templates import *  # noqa: F403
