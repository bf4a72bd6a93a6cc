"""The pause of engines under slime's delta updater and ours, on one fake engine."""
