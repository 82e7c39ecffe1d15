"""Checkpoints: asynchronous, resharding, published whole, verified when loaded."""
