"""What the simulated device is called, free of torch."""

HPU = "hpu"
"""torch's own HPU key: no generated methods, no seeding by torch.manual_seed, no c10d kernels in stock torch."""
RENAMED = "acme"
"""PrivateUse1 under a name of its own, as out-of-tree vendors have it."""
KEYS = (HPU, RENAMED)
LIBRARY = "simccl"
"""The collective library's name in torch.distributed."""
DEVICES = 4
"""How many there are; each process of a run takes one."""
