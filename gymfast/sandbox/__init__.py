"""Sandboxes in which the actions of rollouts run; so far the policies of their pools."""
