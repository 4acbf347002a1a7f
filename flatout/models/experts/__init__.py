"""Routed experts: their block through transformers' experts interface, adapters on them, and the router's losses."""
