"""Whole steps compiled for TPUs that are not here: record and export in one process, compile in another."""
