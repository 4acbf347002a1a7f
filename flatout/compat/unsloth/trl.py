"""TRL's names for supervised fine-tuning: change `from trl import ...` to `from flatout.compat.unsloth.trl import ...`."""

from flatout.compat.unsloth.trainer import SFTConfig as SFTConfig
from flatout.compat.unsloth.trainer import SFTTrainer as SFTTrainer
