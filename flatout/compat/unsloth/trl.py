"""TRL's names for supervised fine-tuning, for preferences and for reward models."""

from flatout.compat.unsloth.preference import CPOConfig as CPOConfig
from flatout.compat.unsloth.preference import CPOTrainer as CPOTrainer
from flatout.compat.unsloth.preference import DPOConfig as DPOConfig
from flatout.compat.unsloth.preference import DPOTrainer as DPOTrainer
from flatout.compat.unsloth.preference import KTOConfig as KTOConfig
from flatout.compat.unsloth.preference import KTOTrainer as KTOTrainer
from flatout.compat.unsloth.preference import ORPOConfig as ORPOConfig
from flatout.compat.unsloth.preference import ORPOTrainer as ORPOTrainer
from flatout.compat.unsloth.preference import RewardConfig as RewardConfig
from flatout.compat.unsloth.preference import RewardTrainer as RewardTrainer
from flatout.compat.unsloth.trainer import SFTConfig as SFTConfig
from flatout.compat.unsloth.trainer import SFTTrainer as SFTTrainer
