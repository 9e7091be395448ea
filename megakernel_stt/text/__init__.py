"""From token ids to text and words."""
