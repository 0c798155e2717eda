"""Tests, the references they compare with, and the program that records those."""
