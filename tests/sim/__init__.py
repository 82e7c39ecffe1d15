"""A simulated accelerator: a device that is not a CPU, on any machine with a C++ compiler.

``tests.sim.device.install`` gives this process a device on torch's own HPU dispatch key, or on PrivateUse1 under
a name of its own. Kernels are the CPU's, so results equal a CPU run's bit for bit; what differs is everything
that a device does otherwise: memory that the host cannot read, fresh memory full of NaN, a capacity, copies and
collectives that are done only when somebody waits for them, generators and streams of its own, and faults.
"""
