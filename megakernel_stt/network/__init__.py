"""The networks in plain PyTorch: features, encoder and transducer."""
