"""Reports: ``report.json`` is the source, everything else is derived from it and checked against it."""
