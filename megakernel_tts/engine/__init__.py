"""The synthesis engine: sessions, scheduling, the main loop, chunking, decoding and delivery."""
