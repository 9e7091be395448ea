"""From text to the talker's input vectors."""
