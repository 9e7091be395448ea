"""What synthesis and recognition share: errors, checkpoints, processes, events. Internal."""
