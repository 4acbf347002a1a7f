from flatout_migrate.doors.opensloth import run_mp_training, setup_envs
