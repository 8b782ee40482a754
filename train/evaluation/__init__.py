"""What `evaluate` measures of a checkpoint, and how results are kept."""
