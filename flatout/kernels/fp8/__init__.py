"""Matrix products in float8 e4m3 with one scale a row: `quantise_rows`, `scaled_product`; reference.py is the truth."""

from flatout.kernels.fp8.reference import quantise_rows
from flatout.kernels.fp8.scaled import fp8_problem, scaled_product

__all__ = ["fp8_problem", "quantise_rows", "scaled_product"]
