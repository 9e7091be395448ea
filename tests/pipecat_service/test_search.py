"""The search for words that are committed in the wrong order or at the wrong time finds none."""

import pytest

from tests.pipecat_service.search import search_interruptions, search_responses

pytestmark = [pytest.mark.contract, pytest.mark.slow]


def test_long_responses_are_committed_in_the_order_of_speech() -> None:
    assert search_responses(300) == []


def test_interruptions_leave_the_words_whose_audio_had_begun() -> None:
    assert search_interruptions(10) == (2000, [])
