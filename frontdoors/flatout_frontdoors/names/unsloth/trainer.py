from flatout.compat.unsloth.trainer import *
