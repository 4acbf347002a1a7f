"""Start a run as several processes, supervise them, and restart them."""
