"""Settings and interfaces of other trainers, translated into flatout's configuration."""
