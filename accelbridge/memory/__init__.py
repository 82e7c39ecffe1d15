"""What a training step keeps between forward and backward: recomputation, and choosing it by a budget."""
