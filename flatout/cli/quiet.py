"""Other libraries' progress bars, off: the console belongs to the run."""

from __future__ import annotations


def quiet_transformers() -> None:
    """Switch off the bars of loading and writing weights for this process; the command line's to decide."""
    from transformers.utils import logging

    logging.disable_progress_bar()
