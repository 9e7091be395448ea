"""The 12.5 Hz codec: codes to waveform (streaming), waveform to codes, waveform to x-vector."""
