"""What is compiled ahead of time: a module for each family, with ``cases(target)``: those of the chip called
``target``, shipped or not."""

FAMILIES = ("fp8", "flash", "layers")
