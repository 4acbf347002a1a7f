"""`flatout verify`: compare one planned step with plain transformers and PEFT."""
