"""Simulator of sandbox pools and RL step time: docs/simulator.md."""
