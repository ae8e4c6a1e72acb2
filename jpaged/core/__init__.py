"""Host-side bookkeeping: requests, pages, scheduling. Pure Python; imports no jax."""
