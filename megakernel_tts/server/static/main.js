/** The page: connects its parts, and shows the state of the server. */

import { Cloning } from "./cloning.js";
import { Composer } from "./composer.js";
import { find, setText } from "./elements.js";
import { showMeasurement, showStatus } from "./figures.js";
import { Player } from "./player.js";
import { KeyNeededError, Server } from "./server.js";
import { snippets } from "./snippets.js";
import { Speaker } from "./speaker.js";
import { SpeechSocket } from "./speech-socket.js";
import { Tabs } from "./tabs.js";
import { Waterfall } from "./waterfall.js";
/** @typedef {import("./server.js").Status} Status */

const POLL_MS = 2000;
const SPEAKING_POLL_MS = 500;

const server = new Server();
const socket = new SpeechSocket(server);
const speaker = new Speaker(socket, new Player(), follow);
const composer = new Composer(speaker, showSnippets);
const cloning = new Cloning(server, async (name) => {
  await refresh();
  if (name) composer.selectVoice(name);
});
const waterfall = new Waterfall(find("waterfall", HTMLTableElement));
const tabs = new Tabs(find("snippets", HTMLDivElement), "Clients");

const content = find("content", HTMLElement);
const keyForm = find("key-form", HTMLFormElement);
const keyInput = find("key", HTMLInputElement);
const keyError = find("key-error", HTMLElement);
/**
 * The last state.
 * @type {Status | null}
 */
let status = null;
let following = false;
let pollTimer = 0;

/** Shows a turn that begins or ends. */
function follow() {
  if (!following) requestAnimationFrame(showTurn);
  following = true;
  poll();
}

function showTurn() {
  const { turn } = speaker;
  composer.update();
  if (turn) {
    showMeasurement(turn.measurement);
    waterfall.draw(turn.measurement);
  }
  following = speaker.speaking;
  if (following) requestAnimationFrame(showTurn);
}

function showSnippets() {
  if (!status) return;
  const { url, socketUrl } = server;
  const key = server.key ? "YOUR_API_KEY" : "none";
  tabs.show(snippets({ url, socketUrl, key, model: status.model, voice: composer.voice }));
}

/** Reads the state of the server and shows it. */
async function refresh() {
  const before = status;
  status = await server.status();
  showStatus(status);
  const state = status.unready_reason ? `, ${status.unready_reason}` : "";
  setText(find("model", HTMLElement), status.model + state);
  if (JSON.stringify(before?.voices) !== JSON.stringify(status.voices)) composer.describe(status);
  if (!before) start(status);
}

/** @param {Status} status */
function start(status) {
  const note = status.note ? ` ${status.note}` : "";
  setText(find("footer", HTMLElement), `megakernel-tts ${status.version}.${note}`);
  keyForm.hidden = true;
  content.hidden = false;
  if (status.takes_voices) cloning.show();
  socket.connect();
  composer.focus();
}

/** Shows the state of the server from now on. */
async function poll() {
  try {
    if (!document.hidden) await refresh();
  } catch (error) {
    if (error instanceof KeyNeededError) {
      askForKey();
      return;
    }
    setText(find("model", HTMLElement), "The server cannot be reached.");
  }
  clearTimeout(pollTimer);
  pollTimer = setTimeout(poll, speaker.speaking ? SPEAKING_POLL_MS : POLL_MS);
}

function askForKey() {
  setText(keyError, server.key ? "The server does not know this key." : "");
  server.key = "";
  status = null;
  content.hidden = true;
  keyForm.hidden = false;
  keyInput.focus();
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  server.key = keyInput.value.trim();
  keyInput.value = "";
  poll();
});

poll();
