"""TRL's names for supervised fine-tuning, for preferences and for reward models."""

from flatout_migrate.unsloth.preference import CPOConfig as CPOConfig
from flatout_migrate.unsloth.preference import CPOTrainer as CPOTrainer
from flatout_migrate.unsloth.preference import DPOConfig as DPOConfig
from flatout_migrate.unsloth.preference import DPOTrainer as DPOTrainer
from flatout_migrate.unsloth.preference import KTOConfig as KTOConfig
from flatout_migrate.unsloth.preference import KTOTrainer as KTOTrainer
from flatout_migrate.unsloth.preference import ORPOConfig as ORPOConfig
from flatout_migrate.unsloth.preference import ORPOTrainer as ORPOTrainer
from flatout_migrate.unsloth.preference import RewardConfig as RewardConfig
from flatout_migrate.unsloth.preference import RewardTrainer as RewardTrainer
from flatout_migrate.unsloth.trainer import SFTConfig as SFTConfig
from flatout_migrate.unsloth.trainer import SFTTrainer as SFTTrainer
