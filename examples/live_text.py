"""Speaks a text while it is being written; writes each chunk of speech to live.wav at once."""

import asyncio
import wave

from megakernel_tts import TTS, AudioChunk, Session

WORDS = "It starts with the first word , and does not wait for the last one .".split()


async def write(session: Session) -> None:
    """Writes a word every 100 ms, as a language model would."""
    for word in WORDS:
        session.push_text(word + " ")
        await asyncio.sleep(0.1)
    session.end()


async def main() -> None:
    with TTS.load() as tts, wave.open("live.wav", "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        session = tts.open(language="english")
        writer = asyncio.create_task(write(session))
        async for event in session:
            if isinstance(event, AudioChunk):
                file.writeframes(event.pcm.tobytes())
                print(f"frame {event.frame}, text {'complete' if writer.done() else 'incomplete'}")
        await writer
        print(session.finish)


asyncio.run(main())
