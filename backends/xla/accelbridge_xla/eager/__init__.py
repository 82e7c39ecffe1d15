"""TorchTPU: the eager execution model, one process per device."""
