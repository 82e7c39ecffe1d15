"""What a run does about values that are not finite and losses that leap."""
