"""The conformance suite: a backend proves what it claims, and a report says which of it is proven.

Read ``registry.py`` (what a test is), ``bench.py`` (what a test is given), one file of ``suite/``, then ``runner.py``
(how tests run in processes of their own). ``mutants/`` proves that the suite can fail. Importing this package loads
neither torch nor a backend.
"""
