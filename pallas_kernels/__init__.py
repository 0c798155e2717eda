"""The heavy operations of a verification step, one folder an operation.

Each folder holds `ref.py` (what it computes, in plain jnp), the implementations side by side
(how), and `op.py` (the public function, where `implementation=` chooses). Kernels know arrays
only: neither caches, nor models, nor the residency table.
"""
