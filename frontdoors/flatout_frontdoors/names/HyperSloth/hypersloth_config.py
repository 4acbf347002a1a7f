from flatout_frontdoors.hypersloth import DataConfig, DataConfigHF, DataConfigShareGPT, FastModelArgs, HFDatasetConfig
from flatout_frontdoors.hypersloth import HyperConfig, LoraArgs, PathDatasetConfig, TrainingArgsConfig, TrainingConfig
