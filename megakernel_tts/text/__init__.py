"""Text processing: splitting, tokenising, and the talker's input vectors."""
