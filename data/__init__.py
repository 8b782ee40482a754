"""Text to Layout batches. NumPy and Grain only: importing anything here never imports JAX."""
