"""The table's figures and verdicts: what counts as equal, and that nothing which is not a number passes."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.errors import NumericError
from flatout.verifier.compare import Comparison, Reference
from flatout.verifier.run import require_equal

BIG, SMALL = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1e-6])


@pytest.fixture
def reference(tmp_path):
    Reference.write(tmp_path / "reference", 2.0, {"big": BIG, "small": SMALL})
    return Reference.read(tmp_path / "reference")


def row_of(reference: Reference, loss: float = 2.0, norm: float | None = None, **changes: Any) -> Comparison:
    gradients: dict[str, Tensor | None] = {"big": BIG, "small": SMALL, **changes}
    return reference.compare("x", loss, reference.norm if norm is None else norm, gradients.items())


def test_the_same_is_equal(reference):
    row = row_of(reference).judged(1e-12)
    assert (row.verdict, row.largest) == ("ok", 0.0)
    assert row.cosine == pytest.approx(1.0, abs=1e-12)


def test_a_difference_is_relative_to_its_parameter_and_named(reference):
    row = row_of(reference, big=BIG * 1.1).judged(1e-4)
    assert row.worst_difference == pytest.approx(0.1, rel=1e-6)
    assert (row.worst_parameter, row.verdict) == ("big", "FAIL")
    # averaged over two ranks instead of summed: the direction is right, the size is not
    halved = row_of(reference, norm=reference.norm / 2, big=BIG / 2, small=SMALL / 2)
    assert halved.cosine == pytest.approx(1.0)
    assert halved.judged(1e-4).verdict == "FAIL"


def test_rounding_of_a_gradient_that_is_zero_is_no_mistake_but_a_wrong_one_is(reference):
    assert row_of(reference, small=SMALL * 1.5).judged(1e-4).verdict == "ok"
    assert row_of(reference, small=torch.tensor([0.0, 1e-3])).judged(1e-4).verdict == "FAIL"


def test_a_parameter_that_is_not_trained_must_have_no_gradient(reference):
    assert reference.compare("x", 2.0, reference.norm, {"big": BIG}.items()).judged(1e-4).verdict == "FAIL"
    frozen = Reference.write(reference.folder / "frozen", 2.0, {"big": BIG, "unreached": torch.zeros(2)})
    assert frozen.compare("x", 2.0, frozen.norm, {"big": BIG}.items()).judged(1e-4).verdict == "ok"


@pytest.mark.parametrize(
    "changes",
    [
        {"big": torch.tensor([math.nan, 4.0])},
        {"big": None},
        {"odd": BIG},
        {"loss": math.nan},
        {"norm": math.inf},
        {"loss": 2.001},
        {"norm": 5.01},
    ],
)
def test_what_is_not_finite_missing_or_odd_fails(reference, changes):
    row = row_of(reference, **changes).judged(1e-4)
    assert row.verdict == "FAIL"
    json.dumps(row.to_json(), allow_nan=False)


def test_a_gradient_that_is_left_out_is_told(reference):
    row = reference.compare("x", 2.0, reference.norm, [("big", BIG)]).judged(1.0)
    assert row.verdict == "FAIL"
    assert "small" in row.note


def test_the_report_names_the_worst_row(reference):
    good, bad = row_of(reference).judged(1e-4), row_of(reference, big=BIG * 2).judged(1e-4)
    left_out = Comparison("zero9", verdict="left out", note="no such thing")
    require_equal((good, left_out))
    with pytest.raises(NumericError, match=r"1 of 2 .* in big; do not train"):
        require_equal((good, bad))
