"""What runs in each of the engine's workers: whose memory is read and written, and when."""
