"""Row formats of fine-tuning data: what they are called, how they are told apart, and how they become samples."""

from flatout.data.formats.detect import detect
from flatout.data.formats.parser import RowParser, make_parser, read_samples

__all__ = ["RowParser", "detect", "make_parser", "read_samples"]
