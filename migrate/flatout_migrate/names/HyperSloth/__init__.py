"""HyperSloth's import name, on flatout."""

from HyperSloth.hypersloth_config import *
