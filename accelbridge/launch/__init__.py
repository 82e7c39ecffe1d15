"""Who starts the ranks: torchrun's agent on one host, or Ray. Importing this imports neither."""
