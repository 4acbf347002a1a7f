from flatout.compat.opensloth import FastModelArgs, HFDatasetConfig, LoraArgs, OpenSlothConfig
from flatout.compat.opensloth import PathDatasetConfig, TrainingArguments, TrainingConfig
