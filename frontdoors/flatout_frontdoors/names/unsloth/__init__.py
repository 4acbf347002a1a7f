from flatout.compat.unsloth import *
