"""python test_multi_gpu.py: the names that scripts for several GPUs import, without a GPU or a model."""

import unsloth
from unsloth.distributed_utils import (
    get_device_map_for_distributed,
    get_optimal_device_map,
    get_rank,
    get_world_size,
    is_distributed_available,
    is_distributed_initialized,
    is_main_process,
    print_distributed_info,
    setup_distributed_training,
    validate_distributed_environment,
)
from unsloth.trainer import UnslothTrainer, UnslothTrainingArguments

exported = ("is_distributed_available", "UnslothTrainer", "UnslothTrainingArguments")
assert all(hasattr(unsloth, name) for name in exported)
print_distributed_info()
assert (get_world_size(), get_rank(), is_main_process(), is_distributed_initialized()) == (1, 0, True, False)
assert setup_distributed_training() == {"distributed": False, "world_size": 1, "rank": 0, "local_rank": 0}
assert get_device_map_for_distributed("model") == "auto"
assert get_optimal_device_map({}, available_gpus=2) == "balanced"
assert validate_distributed_environment()
args = UnslothTrainingArguments(
    output_dir="./test_output",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    enable_distributed_training=False,
    distributed_backend="nccl",
)
assert (args.enable_distributed_training, args.distributed_backend) == (False, "nccl")
assert all(hasattr(UnslothTrainer, name) for name in ("training_step", "compute_loss"))
print(f"All names are there; several GPUs: {is_distributed_available()}")
