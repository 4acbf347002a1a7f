from flatout.compat.hypersloth import DataConfig, DataConfigHF, DataConfigShareGPT, FastModelArgs, HFDatasetConfig
from flatout.compat.hypersloth import HyperConfig, LoraArgs, PathDatasetConfig, TrainingArgsConfig, TrainingConfig
