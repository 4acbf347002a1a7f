"""Linear layers and experts with frozen weights, in bf16, fp8 and 4 bits."""
