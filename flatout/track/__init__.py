"""What a run writes to its folder and shows on the console."""
