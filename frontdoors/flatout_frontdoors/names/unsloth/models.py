from flatout.compat.unsloth.models import *
