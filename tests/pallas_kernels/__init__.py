"""Tests of the array operations, one class over all implementations of each."""
