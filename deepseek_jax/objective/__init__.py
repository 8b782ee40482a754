"""What a stage trains for: (output, layout) -> (scalar, metrics)."""
