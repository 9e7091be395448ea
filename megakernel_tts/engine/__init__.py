"""The engine: one thread that schedules all streams and delivers their audio."""
