"""The cases: pytest-benchmark tests, one file per area."""
