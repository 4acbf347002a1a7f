"""Row formats of fine-tuning data: how they are detected, and how they become samples.

Their table is `RULES` in `rules.py`, in the order of detection.
"""
