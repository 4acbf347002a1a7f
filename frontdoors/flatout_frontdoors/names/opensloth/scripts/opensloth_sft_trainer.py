from flatout.compat.opensloth import run_mp_training, setup_envs
