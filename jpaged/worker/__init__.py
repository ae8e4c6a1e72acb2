"""Owns the device: params, kv, row state and the compiled programs."""
