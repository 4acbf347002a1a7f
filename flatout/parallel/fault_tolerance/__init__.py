"""Heartbeats between ranks, and the thread that ends a rank when another is lost."""
