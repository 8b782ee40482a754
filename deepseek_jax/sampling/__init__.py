"""Decoding: a cache as a value, prefill with early exit, one step at a time, choosing tokens."""
