"""Publish and subscribe: versions of weights in a store, committed once and followed exactly."""
