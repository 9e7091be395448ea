"""A LiveKit agent: recognition and answers by OpenAI, speech by `megakernel-tts serve`.

    pip install '.[server,livekit-agent]'
    megakernel-tts serve &
    export OPENAI_API_KEY=...
    python examples/livekit_agent.py console    # speaks through this machine's microphone
    python examples/livekit_agent.py dev        # joins the rooms of LIVEKIT_URL

LiveKit's own plugin for Cartesia is the client. MEGAKERNEL_TTS_URL, MEGAKERNEL_TTS_KEY and
MEGAKERNEL_TTS_VOICE select another server, one of its keys and one of its voices. OPENAI_BASE_URL
and OPENAI_MODEL select a compatible endpoint for recognition and answers.
"""

import os

from livekit.agents import Agent, AgentServer, AgentSession, JobContext, cli
from livekit.plugins import cartesia, openai

INSTRUCTION = "What you write is spoken: use two or three plain sentences, no markdown or emoji."

server = AgentServer()


def text_to_speech() -> cartesia.TTS:
    return cartesia.TTS(
        base_url=os.getenv("MEGAKERNEL_TTS_URL", "http://127.0.0.1:8000"),
        api_key=os.getenv("MEGAKERNEL_TTS_KEY", "none"),  # the plugin requires one
        voice=os.getenv("MEGAKERNEL_TTS_VOICE", "alloy"),  # stands for one of the model's voices
    )


def agent_session() -> AgentSession:
    return AgentSession(
        stt=openai.STT(),
        llm=openai.LLM(model=os.getenv("OPENAI_MODEL", "gpt-4.1-mini")),
        tts=text_to_speech(),
        use_tts_aligned_transcript=True,  # the transcript ends with the word that was played last
    )


@server.rtc_session()
async def converse(context: JobContext) -> None:
    """Handles one call."""
    session = agent_session()
    await session.start(Agent(instructions=INSTRUCTION), room=context.room)
    session.generate_reply(instructions="Greet the caller in one sentence.")


if __name__ == "__main__":
    if not os.getenv("OPENAI_API_KEY"):
        raise SystemExit(
            "OPENAI_API_KEY is not set, and without it this agent can neither recognise speech nor "
            "answer: export OPENAI_API_KEY=..., or try examples/text_only.py, which needs no keys."
        )
    cli.run_app(server)
