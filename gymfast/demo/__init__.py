"""`gymfast demo`: a real trainer, two receivers, a kill, a damaged object, and the numbers.

Nothing in gymfast imports this package but the command line; only the trainer loads torch.
"""
