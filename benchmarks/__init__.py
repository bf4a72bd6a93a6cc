"""Benchmarks of gymfast: `python -m benchmarks delta`. See benchmarks/README.md."""
