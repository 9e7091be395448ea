"""Spaces in the conversation next to a word that a pause of the text may have divided.

Pipecat joins the words of a conversation by spaces, unless both of two adjacent words bring their
own. A word that was released during a pause may be continued by the text after it ("Ham|burg"), so
it brings its own space, and so does its continuation, which has none.
"""

from pipecat.frames.frames import TTSTextFrame

from pipecat_service.words import WordGroup, unspaced


class GroupSpacing:
    """The spaces of a group's words."""

    def __init__(self, group: WordGroup) -> None:
        """Prepares for the words of a group.

        Args:
            group: Continues a word, or may be continued.
        """
        self._may_continue = group.may_continue
        self._continues_word = group.continues_word  # with its next word

    def apply(self, frame: TTSTextFrame) -> None:
        """Sets the spaces of the group's next word."""
        continues_word, self._continues_word = self._continues_word, False
        if not (continues_word or self._may_continue):
            return
        frame.includes_inter_frame_spaces = True
        if not continues_word and not unspaced(frame.text):
            frame.raw_text = f" {frame.raw_text or frame.text}"
