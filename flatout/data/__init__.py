"""From rows to tokens and label masks on disk."""
