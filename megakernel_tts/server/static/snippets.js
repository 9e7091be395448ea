/** Programs that speak with this server, one for each client. */

/**
 * What the programs use.
 * @typedef {object} Target
 * @property {string} url Of the server.
 * @property {string} socketUrl The same for WebSockets.
 * @property {string} key
 * @property {string} model
 * @property {string | null} voice Null for models without voices.
 */

/**
 * A program: the name of its client, and its text.
 * @typedef {{name: string, code: string}} Snippet
 */

/** @param {string} text */
const shellQuoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/**
 * Gives the programs.
 * @param {Target} target
 * @returns {Snippet[]}
 */
export function snippets(target) {
  const frameworks = { curl, "OpenAI Python": openai, Pipecat: pipecat, LiveKit: livekit };
  const packages = { "Cartesia Python": cartesia, "ElevenLabs Python": elevenlabs };
  const programs = { ...frameworks, ...packages, JavaScript: javascript };
  return Object.entries(programs).map(([name, program]) => ({
    name,
    code: program(target).trim(),
  }));
}

/** @param {Target} target */
function curl({ url, key, voice }) {
  const body = JSON.stringify({ input: "Hello from curl.", ...(voice && { voice }) });
  const header = key === "none" ? "" : `  -H ${shellQuoted(`Authorization: Bearer ${key}`)} \\\n`;
  return `
curl ${shellQuoted(`${url}/v1/audio/speech`)} \\
${header}  -d ${shellQuoted(body)} -o hello.wav
`;
}

/** @param {Target} target */
function openai({ url, key, model, voice }) {
  return `
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${url}/v1`)}, api_key="${key}")
with client.audio.speech.with_streaming_response.create(
    model=${JSON.stringify(model)},
    voice=${JSON.stringify(voice ?? "alloy")},
    input="Hello from Python.",
    response_format="wav",
) as speech:
    speech.stream_to_file("hello.wav")
`;
}

/** @param {Target} target */
function pipecat({ socketUrl, key, model, voice }) {
  return `
from pipecat.services.cartesia.tts import CartesiaTTSService

tts = CartesiaTTSService(
    api_key="${key}",
    url=${JSON.stringify(`${socketUrl}/tts/websocket`)},
    settings=CartesiaTTSService.Settings(
        model=${JSON.stringify(model)}, voice=${JSON.stringify(voice ?? "")}
    ),
)
`;
}

/** @param {Target} target */
function livekit({ url, key, model, voice }) {
  return `
from livekit.plugins import cartesia

tts = cartesia.TTS(
    api_key="${key}",
    base_url=${JSON.stringify(url)},
    model=${JSON.stringify(model)},
    voice=${JSON.stringify(voice ?? "")},
)
`;
}

/** @param {Target} target */
function cartesia({ url, socketUrl, key, model, voice }) {
  return `
import asyncio
import wave

from cartesia import AsyncCartesia

client = AsyncCartesia(
    api_key="${key}",
    base_url=${JSON.stringify(url)},
    websocket_base_url=${JSON.stringify(socketUrl)},
)


async def main():
    with wave.open("hello.wav", "wb") as file:
        file.setparams((1, 2, 24000, 0, "NONE", ""))
        async with client.tts.websocket_connect() as connection:
            context = connection.context(
                model_id=${JSON.stringify(model)},
                voice={"mode": "id", "id": ${JSON.stringify(voice ?? "")}},
                output_format={"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000},
            )
            await context.push("Hello from ")
            await context.push("Cartesia's client.")
            await context.no_more_inputs()
            async for event in context.receive():
                if event.type == "chunk":
                    file.writeframes(event.audio)


asyncio.run(main())
`;
}

/** @param {Target} target */
function elevenlabs({ url, key, voice }) {
  return `
import wave

from elevenlabs.client import ElevenLabs

client = ElevenLabs(api_key="${key}", base_url=${JSON.stringify(url)})
speech = client.text_to_speech.stream(
    ${JSON.stringify(voice ?? "alloy")},
    text="Hello from ElevenLabs' client.",
    output_format="pcm_24000",
)
with wave.open("hello.wav", "wb") as file:
    file.setparams((1, 2, 24000, 0, "NONE", ""))
    for audio in speech:
        file.writeframes(audio)
`;
}

/** @param {Target} target */
function javascript({ socketUrl, key, model, voice }) {
  const query = key === "none" ? "" : `?api_key=${key}`;
  return `
const socket = new WebSocket(${JSON.stringify(`${socketUrl}/tts/websocket${query}`)});
const speech = {
  context_id: "1",
  model_id: ${JSON.stringify(model)},
  voice: { mode: "id", id: ${JSON.stringify(voice ?? "")} },
  output_format: { container: "raw", encoding: "pcm_s16le", sample_rate: 24000 },
  add_timestamps: true,
};
socket.onopen = () => {
  for (const word of ["Hello ", "from ", "JavaScript."])
    socket.send(JSON.stringify({ ...speech, transcript: word, continue: true }));
  socket.send(JSON.stringify({ ...speech, transcript: "", continue: false }));
};
socket.onmessage = ({ data }) => {
  const event = JSON.parse(data);
  if (event.type === "chunk") console.log(atob(event.data).length / 2, "samples");
  if (event.type === "timestamps") console.log(...event.word_timestamps.words);
  if (event.type === "done") socket.close();
};
`;
}
