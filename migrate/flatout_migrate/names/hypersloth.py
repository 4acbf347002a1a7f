from HyperSloth.hypersloth_config import *
