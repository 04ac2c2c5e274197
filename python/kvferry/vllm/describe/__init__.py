"""What vLLM's specs, layers and tensors say, as a manifest."""
