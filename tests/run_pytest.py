"""Runs the named files of tests: what a `py_test` of BUILD executes."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
