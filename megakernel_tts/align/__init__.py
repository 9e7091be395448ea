"""When each word is spoken: text against speech, frame by frame."""
