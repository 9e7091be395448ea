"""`megakernel-tts bench`: how soon and how fast a model speaks; defined in `bench/README.md`."""
