"""Many short sessions with random cancels: nothing may leak, nothing may get stuck.

python -m bench.soak --sessions 10000 --json bench/results/soak.json
"""

import argparse
import asyncio
import gc
import json
import platform
import random
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from megakernel_tts import TTS, AudioChunk, ChunkPolicy, Sampling, Voice

_WORKERS = 12  # more than slots, so that sessions wait, too
_TEXTS = (
    "Hello.",
    "你好，世界。",
    "This is a test of speech. And another one!",
    "3.14",
    "👩\u200d👧 ok",
    "A long one, of many sentences. " * 12,
)
_SETTLED = 0.2  # the share of the sessions after which memory should have stopped growing


@dataclass(frozen=True)
class Report:
    """What was seen."""

    sessions: int
    cancelled: int
    frames: int
    seconds: float
    rss_settled_mb: float
    rss_end_mb: float
    threads_left: int
    tasks_left: int
    sessions_left: int
    slots_free: bool

    @property
    def growth(self) -> float:
        """Growth of the resident memory after the first fifth, as a share."""
        return self.rss_end_mb / self.rss_settled_mb - 1


def _voice(tts: TTS, rng: random.Random) -> str | Voice:
    """A named voice; for a Base model one of an x-vector or of a recording."""
    if tts.voices:
        return rng.choice(list(tts.voices))
    hidden = tts._loaded.config.talker.stack.hidden
    x_vector = torch.full((hidden,), 0.01 * rng.randrange(3))
    recorded = torch.full((rng.randint(1, 9), 16), 7)
    return rng.choice((Voice(x_vector), Voice(x_vector, recorded, "What was said.")))


async def _one(tts: TTS, rng: random.Random) -> tuple[int, bool]:
    """One session in a random manner; gives its frames and whether it was cancelled."""
    text = rng.choice(_TEXTS)
    sampling = Sampling(seed=rng.randrange(1 << 32), max_frames=rng.randint(1, 5))
    voice = _voice(tts, rng)
    stop_after = rng.choice((0, 1, 2, 99, 99))
    frames = chunks = 0
    manner = rng.choice(("stream", "whole", "late", "slow reader", "failing"))
    if manner == "stream":
        stream = tts.astream(text, voice, sampling=sampling)
        async for chunk in stream:
            frames, chunks = frames + len(chunk.codes), chunks + 1
            if chunks >= stop_after:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return frames, chunks >= stop_after
    failing = manner == "failing" and not isinstance(voice, str)
    if manner == "failing" and not isinstance(voice, str):  # its prompt fits no slot
        voice = Voice(voice.x_vector, torch.full((1, 16), 7), "Many words. " * 500)
    layout = "full" if failing else rng.choice(("full", "streaming"))
    session = tts.open(voice, layout=layout, sampling=sampling, chunks=ChunkPolicy(1, 2, 3))
    session.push_text(text)
    if stop_after == 0:
        session.cancel()
    if manner == "late":
        asyncio.get_running_loop().call_later(0.01, session.end)
    else:
        session.end()
    async for event in session:
        if manner == "slow reader":
            await asyncio.sleep(0.005)
        if isinstance(event, AudioChunk):
            frames, chunks = frames + len(event.codes), chunks + 1
            if chunks >= stop_after:
                session.cancel()
    assert session.finish is not None
    reason = session.finish.reason
    assert reason != "error" or failing, session.finish
    return frames, reason == "cancelled"


async def _all(tts: TTS, sessions: int, seed: int) -> tuple[int, int, float, int]:
    """Runs the workers; gives frames, cancelled sessions, settled memory and tasks left over."""
    process, numbers = psutil.Process(), iter(range(sessions))
    frames = cancelled = done = 0
    settled = 0.0
    with tqdm(total=sessions, desc="sessions", disable=None) as progress:

        async def work() -> None:
            nonlocal frames, cancelled, done, settled
            for number in numbers:
                made, stopped = await asyncio.wait_for(_one(tts, random.Random(seed + number)), 120)
                frames, cancelled = frames + made, cancelled + stopped
                done += 1
                progress.update()
                if done == int(_SETTLED * sessions):
                    gc.collect()
                    settled = process.memory_info().rss / 1e6

        await asyncio.gather(*(work() for _ in range(_WORKERS)))
    return frames, cancelled, settled, len(asyncio.all_tasks()) - 1


def soak(tts: TTS, sessions: int, seed: int = 0) -> Report:
    """Runs the sessions and looks at what is left of them."""
    tqdm.monitor_interval = 0  # its thread would count as left over
    tts.warmup()
    threads = threading.active_count()
    start = time.perf_counter()
    frames, cancelled, settled, tasks = asyncio.run(_all(tts, sessions, seed))
    seconds = time.perf_counter() - start
    engine = tts._loaded.engine
    deadline = time.monotonic() + 10
    while engine.sessions and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    return Report(
        sessions=sessions,
        cancelled=cancelled,
        frames=frames,
        seconds=round(seconds, 1),
        rss_settled_mb=round(settled, 1),
        rss_end_mb=round(psutil.Process().memory_info().rss / 1e6, 1),
        threads_left=threading.active_count() - threads,
        tasks_left=tasks,
        sessions_left=engine.sessions,
        slots_free=engine.free == engine.backend.slots,
    )


def main() -> None:
    """Prints the report; writes it with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TTS.load(options.model, options.device) as tts:
        report = soak(tts, options.sessions)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    content = asdict(report) | {
        "growth": round(report.growth, 4),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": commit,
        "date": date.today().isoformat(),
    }
    print(json.dumps(content, indent=2))
    if options.json:
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
