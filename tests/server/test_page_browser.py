"""The page in Chromium: typing, hearing, interrupting, cloning, with the keyboard alone."""

import re
from itertools import pairwise

import numpy as np
import pytest

from bench.simulation import RATE, words_in_audio
from megakernel_tts import TTS
from tests.browser import CONTROL, Page
from tests.server.driving import (
    STATE,
    Drive,
    assert_in_order,
    finish,
    open_page,
    open_with_key,
    text_of,
    wait_for_key_form,
)
from tests.server.hearing import interrupt_audio, pieces, shown_words
from tests.server.running import RunningServer, locked_by, running_server, until

SPEAKING = f"{STATE} === 'Speaking.' && window.words.length > 0"
SENTENCES = "It is. It is not! 3.14, you see"
LONG = "alpha bravo charlie delta echo foxtrot golf hotel india juliet " * 6


def test_words_are_spoken_while_they_are_typed(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        await page.type("Once upon ")
        await page.wait_until(SPEAKING)  # although the turn goes on
        await page.type("a time, friend")  # and ends when nothing more is typed
        await page.wait_until(f"{STATE}.startsWith('Finished')")
        played = await pieces(page)
        seconds = sum(len(piece.pcm) for piece in played) / RATE
        assert seconds > 1 and f"{seconds:.1f} s" in await page.run(STATE)
        assert_in_order(await shown_words(page), "Once upon a time, friend")
        assert await page.run("document.querySelector('mark').textContent") == ""
        assert int(await text_of(page, "#waterfall tr:nth-child(1) td:last-child")) >= 4
        assert int(await text_of(page, "#waterfall tr:nth-child(3) td:last-child")) == len(played)
        assert float((await text_of(page, "#first-chunk")).replace(",", "")) > 0
        assert server.num_streams == 0
        assert not page.errors

    drive(test)


def test_a_word_is_shown_from_its_start_to_the_next(drive: Drive, server: RunningServer) -> None:
    script = """
      (async () => {
        const { LiveText } = await import("/static/live-text.js");
        const { Turn } = await import("/static/turn.js");
        const text = new LiveText();
        text.edit(TEXT);
        text.take(true);
        const player = { begin() {}, stop() {}, busy: true };
        let listener;
        const socket = { open: (_, given) => (listener = given), cancel() {} };
        const turn = new Turn(socket, player, {}, text, 0, () => {});
        TEXT.split(" ").forEach((text, index) => listener.onWords([{ text, startS: index }]));
        return [-1, ...TEXT.split(" ").keys()].map((second) => {
          player.positionS = second + 0.5;
          return turn.spokenRange;
        });
      })()
    """

    async def test(page: Page) -> None:
        await open_page(page, server)
        (before, *ranges) = await page.run(script.replace("TEXT", repr(SENTENCES)))
        assert before == [0, 0]
        starts = [match.start() for match in re.finditer(r"\S+", SENTENCES)]
        assert [start for start, _ in ranges] == starts
        assert [SENTENCES[start:end] for start, end in ranges] == SENTENCES.split()

    drive(test)


def test_pasted_text_is_played_without_gaps(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        await page.insert("one two three four five six")
        await page.wait_until("window.level() > 0.05")
        await finish(page)
        played = await pieces(page)
        for before, piece in pairwise(played):
            if piece.scheduled_s < before.end_s:  # a busy machine may delay the others
                assert piece.start_s == pytest.approx(before.end_s, abs=1e-6)
        pcm = np.concatenate([piece.pcm for piece in played])
        assert np.array_equal(pcm, server.speech("one two three four five six"))
        await page.wait_until("window.level() === 0")
        assert float(await text_of(page, "#real-time-factor")) > 0
        assert not page.errors

    drive(test)


@pytest.mark.slow
def test_escape_interrupts_speech_and_stream(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        aborted = server.metric('requests_success_total{finished_reason="abort"}')
        await page.insert(LONG)
        await interrupt_audio(page, "window.words.length > 2")
        await until(lambda: server.num_streams == 0)
        assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1
        await page.wait_until("window.level() === 0")
        played = await pieces(page)
        assert played[-1].stop_delay_s is not None and played[-1].stop_delay_s <= 0.01
        spoken, silent = await text_of(page, ".mirror span"), await text_of(page, ".mirror i")
        assert spoken + silent == LONG
        assert await page.run(STATE) == f"Interrupted after “{spoken.split()[-1]}”."
        await page.type("onward ")  # is the next turn
        await finish(page)
        assert words_in_audio((await pieces(page))[len(played)].pcm) == [0]
        assert not page.errors

    drive(test)


def test_a_change_of_text_that_was_sent_starts_again_there(
    drive: Drive, server: RunningServer
) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        await page.type("good morning ")
        await page.wait_until(SPEAKING)
        for _ in "morning ":
            await page.press("Backspace")
        await until(lambda: server.num_streams == 0)
        await page.type("evening ")
        await finish(page)
        assert words_in_audio((await pieces(page))[-1].pcm) == [0]  # of a turn with one word
        assert await text_of(page, ".mirror span") == "good evening "
        assert not page.errors

    drive(test)


def test_text_after_the_end_of_a_turn_waits_for_it(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        await page.type("first turn")
        await page.press("Enter", CONTROL)
        await page.type(" second turn")
        await page.press("Enter", CONTROL)
        await page.wait_until(f"window.words.includes('second') && {STATE}.startsWith('Finished')")
        played = await pieces(page)
        assert all(before.end_s <= piece.start_s + 1e-6 for before, piece in pairwise(played))
        assert all(piece.stop_delay_s is None for piece in played)
        await page.press("Enter", CONTROL)  # all of it once more, as one turn
        num_shown = len(await shown_words(page))
        await page.wait_until(f"window.words.length > {num_shown}")
        await page.wait_until(f"{STATE}.startsWith('Finished')")
        assert_in_order((await shown_words(page))[num_shown:], "first turn second turn")
        assert not page.errors

    drive(test)


def test_voice_and_language_are_those_of_the_next_turn(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        opened = server.tts._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]
        await page.run("document.querySelector('#voice').focus()")
        await page.type("s")  # selects Serena
        await page.press("Tab")
        await page.type("g")
        await page.run("document.querySelector('#text').focus()")
        await page.type("hello")
        await finish(page)
        assert opened[-1][:2] == ("serena", "german")
        assert "serena" in await text_of(page, "#snippets code")

    drive(test)


def test_the_keyboard_reaches_every_control_in_order(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        order: list[str] = []
        for _ in range(8):
            order.append(await page.run("document.activeElement.id"))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert order[-1] == "text" or await page.run(outline) != "none"
            await page.press("Tab")
        assert order[:5] == ["text", "instruct", "voice", "language", "speak"]
        assert order[5] == "snippets-panel-tab-0"
        await page.run("document.activeElement.blur()")
        await page.run("document.querySelector('[role=tab]').focus()")
        for key, name in (("ArrowRight", "OpenAI Python"), ("End", "JavaScript"),
                          ("ArrowRight", "curl"), ("ArrowLeft", "JavaScript")):  # fmt: skip
            await page.press(key)
            assert await page.run("document.activeElement.textContent") == name
        selected = "document.querySelectorAll('[aria-selected=true][tabindex=\"0\"]').length"
        assert await page.run(selected) == 1

    drive(test)


def test_every_control_has_a_name_and_the_page_its_landmarks(
    drive: Drive, server: RunningServer
) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        await page.run("document.querySelectorAll('[hidden]').forEach((e) => (e.hidden = false))")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
        assert {"main", "banner", "contentinfo", "heading", "status", "table"} <= {*roles}
        named = ("button", "textbox", "combobox", "tab", "tabpanel", "checkbox", "region", "Audio")
        for node in nodes:
            if not node["ignored"] and node["role"]["value"] in named:
                assert node["name"]["value"].strip(), node
        assert roles.count("textbox") == 5 and roles.count("combobox") == 2
        levels = await page.run("[...document.querySelectorAll('h1, h2')].map((h) => h.tagName)")
        assert levels[0] == "H1" and levels.count("H1") == 1

    drive(test)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen(drive: Drive, server: RunningServer, width: int) -> None:
    async def test(page: Page) -> None:
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        await page.call("Emulation.setDeviceMetricsOverride", **metrics)
        try:
            await open_page(page, server)
            assert await page.run("document.documentElement.scrollWidth") <= width
            same = "['#text', '#mirror'].map((id) => document.querySelector(id).clientHeight)"
            await page.insert(LONG)
            heights = await page.run(same)
            assert heights[0] == heights[1] > 200  # the text and its words lie on each other
            await page.press("Escape")
        finally:
            await page.call("Emulation.clearDeviceMetricsOverride")

    drive(test)


def test_the_colours_have_enough_contrast(drive: Drive, server: RunningServer) -> None:
    """At least 4.5:1 for text, as WCAG 2 requires, in both schemes."""
    ratio = """
      (first, second) => {
        const luminance = (name) => {
          const element = document.body.appendChild(document.createElement("i"));
          element.style.color = `var(${name})`;
          const canvas = new OffscreenCanvas(1, 1).getContext("2d");
          canvas.fillStyle = getComputedStyle(element).color;
          element.remove();
          canvas.fillRect(0, 0, 1, 1);
          const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
          });
          return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
        };
        const [low, high] = [luminance(first), luminance(second)].sort((a, b) => a - b);
        return high / low;
      }
    """

    async def test(page: Page) -> None:
        await open_page(page, server)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            await page.call("Emulation.setEmulatedMedia", features=[feature])
            for first, second, least in (
                ("--ink", "--paper", 7), ("--muted", "--paper", 4.5), ("--muted", "--surface", 4.5),
                ("--accent", "--paper", 4.5), ("--accent", "--glow", 4.5),
                ("--on-accent", "--accent", 4.5), ("--edge", "--paper", 3),
            ):  # fmt: skip
                contrast = await page.run(f"({ratio})({first!r}, {second!r})")
                assert contrast >= least, (scheme, first, second, contrast)
        await page.call("Emulation.setEmulatedMedia", features=[])

    drive(test)


def test_a_server_with_keys_is_used_with_one(drive: Drive, engine: TTS) -> None:
    async def test(page: Page) -> None:
        await open_with_key(page, server, "wrong")
        await page.wait_until("document.querySelector('#key-error').textContent !== ''")
        await wait_for_key_form(page)
        await page.type("right")
        await page.press("Enter")
        await page.wait_until("document.activeElement.id === 'text'")
        await page.type("hello")
        await finish(page)
        assert words_in_audio((await pieces(page))[0].pcm) == [0]
        assert "YOUR_API_KEY" in await text_of(page, "#snippets code")
        assert "right" not in await page.run("document.documentElement.outerHTML")
        assert all("401" in error for error in page.errors)
        await open_page(page, server)  # the tab keeps the key

    with running_server(engine, locked_by("right")) as server:
        drive(test)


def test_a_lost_connection_is_reported_and_opened_again(drive: Drive, engine: TTS) -> None:
    async def test(page: Page) -> None:
        with running_server(engine) as server:
            await open_page(page, server)
            await page.insert(LONG)
            await page.wait_until(SPEAKING)
        await page.wait_until(f"/connection|cannot be reached/.test({STATE})")

    drive(test)


# Text and the length of its complete words.
COMPLETE = {
    "": 0,
    "wor": 0,
    "a wor": 2,
    "a word ": 7,
    "The end.": 8,
    "It costs 3.": 9,
    "It costs 3. ": 12,
    "e.g": 0,
    "Really?!": 8,
    "你好": 2,
    "안녕 하": 3,
    "new\nline": 4,
}


def test_words_are_complete_where_they_cannot_go_on(drive: Drive, server: RunningServer) -> None:
    async def test(page: Page) -> None:
        await page.open(server.url)
        load = "const { completeLength } = await import('/static/live-text.js');"
        script = f"(async () => {{ {load} return {[*COMPLETE]}.map(completeLength); }})()"
        assert await page.run(script) == [*COMPLETE.values()]

    drive(test)


def test_the_real_time_factor_is_that_of_the_fastest_part(
    drive: Drive, server: RunningServer
) -> None:
    async def test(page: Page) -> None:
        await page.open(server.url)
        load = "const { realTimeFactor } = await import('/static/measurement.js');"
        # 20 ms per 80 ms of audio; a pause for text; chunks at the pace of playback.
        times = [0, 20, 40, 60, 80, 100, 120, 900, 980, 1060]
        chunks = [{"atMs": time, "seconds": 0.08} for time in times]
        script = (
            f"(async () => {{ {load} return [{chunks}, {chunks[:5]}].map(realTimeFactor); }})()"
        )
        factor, none = await page.run(script)
        assert factor == pytest.approx(0.25) and none is None

    drive(test)
