"""Questions with known answers, generated from a seed over real text. NumPy only."""
