from flatout.compat.unsloth.trl import SFTConfig, SFTTrainer
