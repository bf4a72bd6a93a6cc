"""Plug-ins for frameworks: one file each, the framework imported inside functions."""
