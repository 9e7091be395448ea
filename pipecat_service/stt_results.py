"""Which tokens of a recogniser's session were spoken, and which no final result has covered."""

import math
from dataclasses import replace

from megakernel_stt import Token, Transcript

_BEFORE_S = 1.0  # of audio before the VAD detects speech: it detects a soft beginning late
_AFTER_S = 1.0  # of audio after the VAD detects the end: a model decodes a token after its sound
_REPEATED_S = 0.3  # of audio after a final result, in which the stream may decode its end again
_ROUNDING_S = 0.001  # a frame may begin where the audio of a final result ends, and is part of it


class UnreportedTokens:
    """Finds the new tokens in the transcripts of one session.

    A transcript is that of the whole session, and each final result of a pipeline has new words
    only. A final result comes from a fork of the stream, and the stream itself decodes the end of
    the fork's audio again: its tokens up to that end are dropped, and those shortly after it if
    they repeat the fork's.

    With a voice activity detector, tokens count while it reports speech, and for a second before
    and after. All times are seconds of audio of the session.
    """

    def __init__(self, offset_s: float, *, gated: bool) -> None:
        """Begins a session.

        Args:
            offset_s: Added to the times of results.
            gated: See `gate`.
        """
        self._offset_s = offset_s
        self._start_s = 0.0
        self._end_s = math.inf
        self._reported: tuple[Token, ...] = ()  # of the last final result, all of its session
        self._reported_s = -math.inf  # length of its audio
        self._num_settled = 0  # tokens of the stream that the last final result has as well
        if gated:
            self.gate()

    def gate(self) -> None:
        """Makes tokens count only while a detector reports speech, which it does not report yet."""
        self._start_s = math.inf

    def begin_speech(self, at_s: float) -> None:
        """The detector has found that speech began at a time.

        It continues speech without a result, if that has just ended.
        """
        start_s = at_s - _BEFORE_S
        self._start_s = min(self._start_s, start_s) if start_s <= self._end_s else start_s
        self._end_s = math.inf

    def end_speech(self, at_s: float) -> None:
        """The detector has found, at this time, that speech has ended."""
        self._end_s = at_s + _AFTER_S

    def new(self, transcript: Transcript) -> Transcript:
        """The tokens of a transcript that are speech and that no final result has covered.

        Args:
            transcript: The latest of the session.
        """
        tokens = transcript.tokens[self._count_reported(transcript.tokens) :]
        new = [token for token in tokens if self._is_new(token)]
        if self._offset_s:
            new = [self._shifted(token) for token in new]
        return Transcript(tuple(new), self._offset_s + transcript.seconds)

    def report(self, transcript: Transcript) -> None:
        """Marks the tokens of a final transcript as covered.

        Args:
            transcript: Of all audio of the session at a time.
        """
        self._reported, self._reported_s = transcript.tokens, transcript.seconds
        if self._end_s < math.inf:
            self.gate()  # the speech that ended is complete

    def settle(self, transcript: Transcript) -> None:
        """Notes what the stream itself, unlike a fork, has decoded: it does not change any more."""
        self._num_settled = self._count_reported(transcript.tokens)

    def _count_reported(self, tokens: tuple[Token, ...]) -> int:
        """Tokens at the beginning that the last final result has as well."""
        limit_s = self._reported_s + _REPEATED_S
        count = self._num_settled
        for ours, reported in zip(tokens[count:], self._reported[count:], strict=False):
            if ours.id != reported.id or ours.start > limit_s:
                break
            count += 1
        return count

    def _is_new(self, token: Token) -> bool:
        after = token.start > self._reported_s + _ROUNDING_S
        return after and self._start_s <= token.start <= self._end_s

    def _shifted(self, token: Token) -> Token:
        offset_s = self._offset_s
        return replace(token, start=token.start + offset_s, end=token.end + offset_s)
