"""One plan for GPUs that differ."""

import pytest

from flatout.errors import UsageError
from flatout.plan.devices import GIB, Device, weakest
from flatout.train.planning import refuse_mixed_precision


def test_all_ranks_plan_for_what_each_can() -> None:
    large, small, old = Device("H200", 139 * GIB), Device("L40S", 44 * GIB), Device("T4", 45 * GIB, has_bf16=False)
    assert weakest([large, large]) == large
    assert weakest([large, small]) == Device("L40S (the smallest of 2 GPUs)", 44 * GIB)
    assert weakest([old, large, small]) == Device("L40S (the smallest of 3 GPUs)", 44 * GIB, has_bf16=False)
    # the same model with less memory free
    assert weakest([large, Device("H200", 138 * GIB)]) == Device("H200", 138 * GIB)


def test_one_precision_for_all() -> None:
    told = [{"host": "a", "name": "H200", "has_bf16": True}, {"host": "b", "name": "T4", "has_bf16": False}]
    with pytest.raises(UsageError, match=r"rank 1 on b has a T4, .* set model\.precision"):
        refuse_mixed_precision(told)
    for alike in (told[:1] * 2, told[1:] * 2):
        refuse_mixed_precision(alike)
