from flatout_migrate.unsloth.trl import *
