"""Matrix products in float8 e4m3 with one scale per row; reference.py has the reference."""

from flatout.kernels.fp8.reference import quantize_rows
from flatout.kernels.fp8.scaled import MULTIPLE, fp8_problem, has_fp8, scaled_product

__all__ = ["MULTIPLE", "fp8_problem", "has_fp8", "quantize_rows", "scaled_product"]
