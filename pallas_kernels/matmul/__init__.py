"""The product of activations with a weight: one op, its meaning, and its implementations."""
