"""Switches off other libraries' progress bars, which would mix with the run's output."""

from __future__ import annotations


def quiet_transformers() -> None:
    """Switch off transformers' progress bars for loading and writing weights, in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
