"""Low-rank adapters: single layers and fused layers."""
