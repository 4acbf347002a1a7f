"""How state and gradients are spread over ranks."""
