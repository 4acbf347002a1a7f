"""Starting a run as several processes: command lines and environments as values, and what watches over them."""
