"""Placeholder for pytest; filled in with the command line."""
