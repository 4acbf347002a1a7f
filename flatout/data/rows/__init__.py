"""Rows from files and hubs, in every format."""
