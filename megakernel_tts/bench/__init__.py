"""`megakernel-tts bench`: latency and throughput of a model; figures: `docs/benchmarks.md`."""
