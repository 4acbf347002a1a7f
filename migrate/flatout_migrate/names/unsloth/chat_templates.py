from flatout_migrate.unsloth.chat_templates import *
