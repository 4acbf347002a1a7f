from flatout_migrate.doors.hypersloth import (
    DataConfig,
    DataConfigHF,
    DataConfigShareGPT,
    FastModelArgs,
    HFDatasetConfig,
)
from flatout_migrate.doors.hypersloth import (
    HyperConfig,
    LoraArgs,
    PathDatasetConfig,
    TrainingArgsConfig,
    TrainingConfig,
)
