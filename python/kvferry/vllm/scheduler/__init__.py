"""What runs in the engine's scheduler: which requests hand over, and whose blocks are kept for whom."""
