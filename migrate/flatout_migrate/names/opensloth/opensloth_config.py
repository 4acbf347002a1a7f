from flatout_migrate.doors.opensloth import DatasetConfigBase, FastModelArgs, HFDatasetConfig, LoraArgs, OpenSlothConfig
from flatout_migrate.doors.opensloth import PathDatasetConfig, TrainingArguments, TrainingConfig
