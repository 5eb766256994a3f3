"""Benchmarks: one file per question, peers measured side by side in one run. See `python -m benchmarks --help`."""
