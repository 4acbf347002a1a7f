"""A finished run, made once."""

import pytest


@pytest.fixture(scope="package")
def run_dir(tiny, tmp_path_factory):
    from flatout.trainer.run import train

    evaluation = {"fraction": 0.1, "every_steps": 1, "prompts": []}
    config = tiny.config(tmp_path_factory.mktemp("export") / "chats", batch={"max_steps": 3}, eval=evaluation)
    return train(config).folder
