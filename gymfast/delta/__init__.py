"""The delta codec: frames that turn one state of named tensors into the next."""
