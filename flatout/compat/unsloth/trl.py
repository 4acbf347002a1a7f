"""TRL's names for supervised fine-tuning."""

from flatout.compat.unsloth.trainer import SFTConfig as SFTConfig
from flatout.compat.unsloth.trainer import SFTTrainer as SFTTrainer
