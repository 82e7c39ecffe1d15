"""Faults put into real runs, and what becomes of them: ``python -m tests.faults`` writes docs/faults.md."""
