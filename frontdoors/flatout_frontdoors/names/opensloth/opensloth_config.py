from flatout_frontdoors.opensloth import DatasetConfigBase, FastModelArgs, HFDatasetConfig, LoraArgs, OpenSlothConfig
from flatout_frontdoors.opensloth import PathDatasetConfig, TrainingArguments, TrainingConfig
