"""Options of `megakernel-tts bench` for tests."""

# Two chunk sizes, one request.
QUICK = ["--device", "cpu", "--runs", "1", "--chunks", "1,8", "--streams", "1"]
