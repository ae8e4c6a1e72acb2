"""Ragged paged attention: one op, its meaning, and its implementations."""
