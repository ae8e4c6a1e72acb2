"""What numba kernels that XLA:CPU calls through its typed FFI have in common."""
