from flatout_migrate.unsloth.distributed_utils import *
