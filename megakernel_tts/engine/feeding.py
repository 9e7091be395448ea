"""From a stream's text to the backend: prompts, prefills and the text vectors that follow them."""

from collections.abc import Sequence

import torch

from megakernel_tts.backends.protocol import Backend, PrefillRequest
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.segment import Segment
from megakernel_tts.engine.stream import Stream, TextSnapshot
from megakernel_tts.errors import SynthesisError
from megakernel_tts.text.prompt import PromptBuilder


class TextFeeder:
    """Begins segments and feeds their text as it arrives. Called by the engine thread."""

    def __init__(self, backend: Backend, prompt_builder: PromptBuilder, vocoder: Vocoder) -> None:
        """Feeds one backend, and sets up the vocoder's slots at the start of segments."""
        self._backend = backend
        self._prompt_builder = prompt_builder
        self._vocoder = vocoder

    def build_prompt(self, stream: Stream) -> None:
        """Builds the prompt of a stream's next segment, if enough text is there.

        Raises:
            SynthesisError: The prompt does not fit a slot.
        """
        request, snapshot = stream.request, stream.text_so_far()
        prompt = self._prompt_builder.build(
            request.prefix, snapshot.token_ids, request.layout, text_ended=snapshot.text_ended
        )
        max_positions = self._backend.max_positions
        if prompt is not None and prompt.num_positions >= max_positions:
            raise SynthesisError(
                f"The prompt takes {prompt.num_positions} positions and a slot has "
                f"{max_positions}: use a shorter reference recording or instruction."
            )
        stream.set_prompt(prompt)

    def prefill(self, streams: Sequence[Stream], budget: int) -> int:
        """Runs prompts of streams that have slots, or chunks of them; one launch serves all.

        Args:
            streams: Streams whose prompts are being run.
            budget: See `Backend.prefill`.

        Returns:
            The number of positions that were run.
        """
        requests = [
            PrefillRequest(
                stream.active_slot,
                stream.active_prompt.prefill,
                stream.request.sampling.next_seed(stream.delivery.attempt),
                stream.num_sampled_frames,
                stream.active_prompt.num_common,
                stream.num_prefilled,
            )
            for stream in streams
        ]
        result = self._backend.prefill(requests, budget)
        for stream, num_prefilled in zip(streams, result.in_place, strict=True):
            stream.record_prefill(num_prefilled)
        return result.num_run

    def begin_segment(self, stream: Stream, now_s: float) -> None:
        """Begins the segment whose prompt was run: vocoder state, rest of the transcript, text."""
        slot, prompt, snapshot = stream.active_slot, stream.active_prompt, stream.text_so_far()
        assert snapshot.segment is not None, "the text of a prompt stays in the queue"
        self._vocoder.load_slot(slot, stream.request.vocoder_state)
        self._backend.feed(slot, prompt.leading_text, prompt.text_complete)
        num_free_positions = self._backend.max_positions - prompt.num_positions
        segment = Segment(
            snapshot.segment,
            num_prompt=prompt.num_positions,
            max_frames=min(stream.request.sampling.max_frames, num_free_positions),
            num_tokens=prompt.num_tokens,
            num_fed=prompt.leading_text.shape[0],
            text_complete=prompt.text_complete,
            last_step_s=now_s,
        )
        stream.begin_segment(segment, prompt.text_start)
        self.feed(stream, snapshot)

    def feed(self, stream: Stream, snapshot: TextSnapshot | None = None) -> None:
        """Feeds the text that has arrived since; the end of the text is fed exactly once.

        Args:
            stream: The stream.
            snapshot: Its text, if it was read just now.
        """
        segment = stream.active_segment
        if segment.text_complete:
            return
        snapshot = snapshot or stream.text_so_far()
        if not stream.has_new_text(snapshot):
            return
        new_ids = snapshot.token_ids[segment.num_tokens :]
        vectors = self._prompt_builder.embed_text(new_ids)
        if snapshot.text_ended:
            vectors = torch.cat([vectors, self._prompt_builder.eos])
        self._backend.feed(stream.active_slot, vectors, snapshot.text_ended)
        stream.add_text(len(new_ids), vectors.shape[0], text_complete=snapshot.text_ended)
