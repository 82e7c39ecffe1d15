"""The tests, one file per family of ids. ``test_conformance.py`` hands them to pytest."""
