"""Matrix products in float8 e4m3 with one scale a row: `quantise_rows`, `scaled_product`; reference.py is the truth."""

from flatout.kernels.fp8.reference import quantise_rows
from flatout.kernels.fp8.scaled import MULTIPLE, fp8_problem, has_fp8, scaled_product

__all__ = ["MULTIPLE", "fp8_problem", "has_fp8", "quantise_rows", "scaled_product"]
