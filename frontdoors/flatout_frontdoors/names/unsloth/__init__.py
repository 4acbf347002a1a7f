from flatout.compat.unsloth import *
from flatout.compat.unsloth import FastModel
