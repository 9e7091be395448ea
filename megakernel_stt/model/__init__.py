"""Configuration, checkpoints and weights of recognisers."""
