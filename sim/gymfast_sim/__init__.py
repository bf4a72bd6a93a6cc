"""Simulator of sandbox pools and RL step time; no features yet."""
