"""Row formats of fine-tuning data: how they are detected, and how they become samples."""
