"""Adapters: one file per framework, the framework imported inside functions."""
