"""Checkpoints in and out: safetensors files, hub directories, and the names of tensors in them.

`checkpoint` finds and checks the files, `key_maps` says which tensor belongs to which parameter,
`loading` places tensors one by one, `saving` writes the same formats. `qwen3_moe` and `gpt_oss`
know how experts lie in a file, `targets` knows the families, `eagle3` adds what draft heads need.
"""
