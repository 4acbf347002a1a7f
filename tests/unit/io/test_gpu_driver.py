"""The driver is called as torch's runtime would call it; a stand-in library writes what it is asked."""

import os
import shutil
import subprocess
import sys

import pytest

from flatout.io.gpu_driver import certain_reason, open_gpu

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static void say(const char *what, int value) {
    FILE *file = fopen(getenv("CALLS"), "a");
    fprintf(file, "%s %d %s\\n", what, value, getenv("CUDA_MODULE_LOADING") ? getenv("CUDA_MODULE_LOADING") : "-");
    fclose(file);
}
int cuInit(unsigned flags) { say("init", flags); return 0; }
int cuDeviceGetCount(int *count) { *count = 4; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return index < 4 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { say("retain", device); *context = 0; return 0; }
"""


@pytest.fixture
def driver(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True, timeout=60)
    return library


@pytest.mark.parametrize(("index", "retained"), [(0, ["retain 10 LAZY"]), (3, ["retain 13 LAZY"]), (4, [])])
def test_the_primary_context_of_the_ranks_gpu_is_made_on_a_thread(driver, tmp_path, index, retained):
    calls = tmp_path / "calls"
    code = f"from flatout.io.gpu_driver import certain_reason, open_gpu\nopen_gpu({index}, {str(driver)!r}).join()"
    env = {**os.environ, "CALLS": str(calls)}
    env.pop("CUDA_MODULE_LOADING", None)
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    assert calls.read_text().splitlines() == ["init 0 LAZY", *retained]


def test_the_launcher_counts_what_the_driver_shows(driver, tmp_path):
    code = "from flatout.launch.ranks import count_gpus\nprint(count_gpus(30.0, 'faults.join_s'))"
    env = {**os.environ, "CALLS": str(tmp_path / "calls"), "LD_LIBRARY_PATH": str(driver.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "4\n"


def test_a_machine_without_the_driver_goes_on(monkeypatch):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    thread = open_gpu(0, "libno-such-driver.so.1")
    thread.join(10)
    assert not thread.is_alive()
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"


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
