"""Streams, slots and the thread that recognises them."""
