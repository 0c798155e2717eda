"""Target models and draft heads as functional Flax modules: parameters in, results out, no I/O.

Axis letters, used in every module here: B batch, T rows of a block (tree nodes), S cached
positions, D model width, N query heads, K kv heads, H head width, E experts, C expert slots,
F expert width, V vocabulary, L layers; k is the number of experts a token.
"""
