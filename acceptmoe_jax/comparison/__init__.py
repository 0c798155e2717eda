"""One checkpoint here and in transformers: the passes of both and the differences between them."""
