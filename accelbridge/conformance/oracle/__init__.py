"""What is right, computed on the host in float64 from the suite's own tables; nothing here asks a backend."""
