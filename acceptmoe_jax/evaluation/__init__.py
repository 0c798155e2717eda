"""Benchmarks, their scorers, and the sandbox for code that a model wrote."""
