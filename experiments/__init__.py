"""Programs, run as `python -m experiments.NAME`; each is a page that calls the library."""
