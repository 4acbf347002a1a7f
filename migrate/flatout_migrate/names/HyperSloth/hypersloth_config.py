from flatout_migrate.doors.hypersloth import DataConfig, DataConfigHF, DataConfigShareGPT, FastModelArgs
from flatout_migrate.doors.hypersloth import HFDatasetConfig, HyperConfig, LoraArgs, PathDatasetConfig
from flatout_migrate.doors.hypersloth import TrainingArgsConfig, TrainingConfig
