from flatout.compat.unsloth.chat_templates import *
