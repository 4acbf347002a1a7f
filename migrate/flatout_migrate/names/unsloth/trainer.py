from flatout_migrate.unsloth.trainer import SFTConfig, SFTTrainer, UnslothTrainer, UnslothTrainingArguments
from flatout_migrate.unsloth.trainer import UnslothVisionDataCollator
