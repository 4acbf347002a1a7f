"""Linear layers with frozen weights in bf16, fp8 and 4 bits, and fp8 training."""
