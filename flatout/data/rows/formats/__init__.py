"""Row formats of fine-tuning data: their names, how they are detected, and how they become samples."""

from flatout.data.rows.formats.detect import detect
from flatout.data.rows.formats.parser import RowParser, make_parser

__all__ = ["RowParser", "detect", "make_parser"]
