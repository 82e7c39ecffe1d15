"""Hangs and lost ranks: what every rank says of itself, and the one verdict that all of them fail with."""
