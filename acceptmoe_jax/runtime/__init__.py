"""Engines that decode with a target and a head, their statistics, and the cost model."""
