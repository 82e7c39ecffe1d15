"""What a training step keeps between forward and backward: recomputation, choosing it by a budget, and advice."""
