"""Checkpoints in and out: safetensors files, hub directories, and the names of tensors in them.

`checkpoint` finds and checks the files, `key_maps` says which tensor belongs to which parameter,
`loading` places tensors one by one, `eagle3` adds what draft heads need, `saving` writes the same
formats.
"""
