from flatout_migrate.unsloth import *
from flatout_migrate.unsloth import FastModel
