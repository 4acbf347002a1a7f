from flatout_migrate.unsloth import *
