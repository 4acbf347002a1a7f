"""Cross-entropy of an output head: the reference over all logits, and the fast form by row tiles."""
