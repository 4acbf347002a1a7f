"""Why there is no GPU is one sentence with the cause."""

import pytest

from flatout.io.no_gpu import certain_reason


@pytest.mark.parametrize(
    ("env", "cuda", "driver", "said"),
    [
        ({}, None, "libc.so.6", "torch 2.13.0 is a build for CPUs"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "12.8", "libc.so.6", "CUDA_VISIBLE_DEVICES= hides all GPUs; unset it"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "12.8", "libc.so.6", "CUDA_VISIBLE_DEVICES=-1 hides all GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "12.8", "libabsent.so.1", "there is no NVIDIA driver"),
    ],
)
def test_the_cause_is_named(env, cuda, driver, said):
    found = certain_reason(env, "2.13.0", cuda, driver)
    assert found is not None
    assert found.startswith(said)


def test_a_driver_that_is_there_is_asked_by_those_who_start_it():
    assert certain_reason({"CUDA_VISIBLE_DEVICES": "0,1"}, "2.13.0", "12.8", "libc.so.6") is None
