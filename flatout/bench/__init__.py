"""`flatout bench`: measures one configuration on this machine. benchmarks/ compares it with other trainers."""
