"""Shipped with gymfast: contracts, synthetic RL-like weights and bitwise comparison for tests."""
