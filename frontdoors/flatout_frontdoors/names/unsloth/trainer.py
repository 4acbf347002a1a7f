from flatout.compat.unsloth.trainer import (
    SFTConfig,
    SFTTrainer,
    UnslothTrainer,
    UnslothTrainingArguments,
    UnslothVisionDataCollator,
)
