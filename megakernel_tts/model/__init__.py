"""Checkpoints: config, tensors, names on the hub, and checkpoints with random weights."""
