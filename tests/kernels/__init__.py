"""The kernels of ``accelbridge/kernels``, without a GPU: interpreted on the CPU, and compiled ahead of time.

    python -m pytest tests/kernels     everything; make test-kernels does it on all cores
    python -m tests.kernels            docs/kernels.md: what every kernel takes on every chip

``interpreter`` mends Triton's CPU interpreter, and makes it as strict as the strictest chip; ``aot`` compiles in child
processes; ``cases`` says, by family of kernels, what is compiled. A process interprets or compiles, never both: so
these tests run in a process of their own, which ``tests/test_kernels.py`` starts in a run of all tests.
"""
