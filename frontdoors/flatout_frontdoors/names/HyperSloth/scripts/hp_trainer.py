from flatout.compat.hypersloth import run_multiprocess_training, setup_envs
