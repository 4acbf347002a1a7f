"""Files, hashes, locks, JSON and sockets; no torch."""
