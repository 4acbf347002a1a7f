from flatout.compat.unsloth.trl import *
