"""The speech server: adapters from protocols of voice applications to sessions of the engine."""
