"""TRL's names for supervised fine-tuning, for preferences and for reward models."""

from flatout_migrate.unsloth.grpo import GRPOConfig as GRPOConfig
from flatout_migrate.unsloth.grpo import GRPOTrainer as GRPOTrainer
from flatout_migrate.unsloth.preference import *  # noqa: F403
from flatout_migrate.unsloth.trainer import SFTConfig as SFTConfig
from flatout_migrate.unsloth.trainer import SFTTrainer as SFTTrainer
