from flatout.compat.opensloth import DatasetConfigBase, FastModelArgs, HFDatasetConfig, LoraArgs, OpenSlothConfig
from flatout.compat.opensloth import PathDatasetConfig, TrainingArguments, TrainingConfig
