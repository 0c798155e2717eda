"""Running code that a model wrote: `run.run` is the way in, the other files are its processes.

caller ── runner (isolates) ── judge (holds the tests) ══ wire ══ answer (the model's code)
"""
