from flatout.compat.unsloth.distributed_utils import *
