"""Runs many short sessions with random cancellations and reports what they leave behind.

The report counts threads, tasks, sessions and slots that remain, and the growth of resident memory.

python -m bench.soak --sessions 10000 --json bench/results/soak-cpu.json
python -m bench.soak --sessions 200000 --slots 64 --device cuda --json bench/results/soak-gpu.json
"""

import argparse
import asyncio
import gc
import random
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from bench.report import write
from megakernel_tts import TTS, AudioChunk, ChunkPolicy, Sampling, Voice

_SESSIONS_PER_SLOT = 1.5  # so that some sessions wait for a slot
_TEXTS = (
    "Hello.",
    "你好，世界。",
    "This is a test of speech. And another one!",
    "3.14",
    "👩\u200d👧 ok",
    "A long one, of many sentences. " * 12,
)
_WARM_UP_SHARE = 0.2  # of the sessions, after which memory should no longer grow
_SESSION_TIMEOUT_S = 120
_CLOSE_TIMEOUT_S = 10


@dataclass(frozen=True)
class SoakReport:
    """Work done and resources left.

    Attributes:
        sessions: Number of sessions.
        cancelled: Sessions that were cancelled.
        frames: Frames received by all sessions.
        seconds: Duration.
        rss_settled_mb: Resident memory after the warm-up share of the sessions.
        rss_end_mb: Resident memory at the end.
        device_growth_mb: Growth of torch's memory on the GPU after the warm-up share; 0 on a CPU.
        threads_left: Threads beyond those before the first session.
        tasks_left: asyncio tasks that did not end.
        sessions_left: Sessions that the engine still holds.
        slots_free: Whether all slots of the backend are free.
    """

    sessions: int
    cancelled: int
    frames: int
    seconds: float
    rss_settled_mb: float
    rss_end_mb: float
    device_growth_mb: float
    threads_left: int
    tasks_left: int
    sessions_left: int
    slots_free: bool

    @property
    def growth(self) -> float:
        """Growth of resident memory after the warm-up share, as a fraction."""
        return self.rss_end_mb / self.rss_settled_mb - 1


@dataclass
class _Totals:
    frames: int = 0
    cancelled: int = 0
    rss_settled_mb: float = 0.0
    device_settled_mb: float = 0.0


def _device_mb() -> float:
    return torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0


def _random_voice(tts: TTS, rng: random.Random) -> str | Voice:
    """A named voice; for a Base model a cloned one, with or without a reference recording."""
    if tts.voices:
        return rng.choice(list(tts.voices))
    hidden = tts._loaded.config.talker.stack.hidden_size
    x_vector = torch.full((hidden,), 0.01 * rng.randrange(3))
    codes = torch.full((rng.randint(1, 9), 16), 7)
    return rng.choice((Voice(x_vector), Voice(x_vector, codes, "What was said.")))


async def _run_session(tts: TTS, rng: random.Random) -> tuple[int, bool]:
    """Runs one session of a random kind.

    Returns:
        Its frames, and whether it was cancelled.
    """
    text = rng.choice(_TEXTS)
    sampling = Sampling(seed=rng.randrange(1 << 32), max_frames=rng.randint(1, 5))
    voice = _random_voice(tts, rng)
    max_chunks = rng.choice((0, 1, 2, 99, 99))
    num_frames = num_chunks = 0
    kind = rng.choice(("stream", "whole text", "late end", "slow reader", "failing"))
    if kind == "stream":
        stream = tts.astream(text, voice, sampling=sampling)
        async for chunk in stream:
            num_frames, num_chunks = num_frames + len(chunk.codes), num_chunks + 1
            if num_chunks >= max_chunks:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return num_frames, num_chunks >= max_chunks
    failing = kind == "failing" and not isinstance(voice, str)
    if kind == "failing" and not isinstance(voice, str):  # a prompt longer than any slot
        voice = Voice(voice.x_vector, torch.full((1, 16), 7), "Many words. " * 227)
    layout = "full" if failing else rng.choice(("full", "streaming"))
    session = tts.open(voice, layout=layout, sampling=sampling, chunks=ChunkPolicy(1, 2, 3))
    session.push_text(text)
    if max_chunks == 0:
        session.cancel()
    if kind == "late end":
        asyncio.get_running_loop().call_later(0.01, session.end)
    else:
        session.end()
    async for event in session:
        if kind == "slow reader":
            await asyncio.sleep(0.005)
        if isinstance(event, AudioChunk):
            num_frames, num_chunks = num_frames + len(event.codes), num_chunks + 1
            if num_chunks >= max_chunks:
                session.cancel()
    assert session.finish is not None
    reason = session.finish.reason
    assert reason != "error" or failing, session.finish
    return num_frames, reason == "cancelled"


async def _run_all(tts: TTS, num_sessions: int, seed: int) -> tuple[_Totals, int]:
    """Runs the sessions on a fixed number of workers.

    Returns:
        The totals, and the number of tasks that did not end.
    """
    process, indices = psutil.Process(), iter(range(num_sessions))
    totals, num_done = _Totals(), 0
    with tqdm(total=num_sessions, desc="sessions", disable=None) as progress:

        async def work() -> None:
            nonlocal num_done
            for index in indices:
                session = _run_session(tts, random.Random(seed + index))
                num_frames, cancelled = await asyncio.wait_for(session, _SESSION_TIMEOUT_S)
                totals.frames += num_frames
                totals.cancelled += cancelled
                num_done += 1
                progress.update()
                if num_done == int(_WARM_UP_SHARE * num_sessions):
                    gc.collect()
                    totals.rss_settled_mb = process.memory_info().rss / 1e6
                    totals.device_settled_mb = _device_mb()

        num_workers = int(_SESSIONS_PER_SLOT * tts._loaded.engine.backend.num_slots)
        await asyncio.gather(*(work() for _ in range(num_workers)))
    return totals, len(asyncio.all_tasks()) - 1


def soak(tts: TTS, num_sessions: int, seed: int = 0) -> SoakReport:
    """Runs sessions and reports what they leave behind.

    Args:
        tts: The engine; warmed up here.
        num_sessions: How many sessions to run.
        seed: Determines every session.

    Returns:
        The report.
    """
    tqdm.monitor_interval = 0  # its thread would be counted
    tts.warmup()
    num_threads = threading.active_count()
    start_s = time.perf_counter()
    totals, tasks_left = asyncio.run(_run_all(tts, num_sessions, seed))
    seconds = time.perf_counter() - start_s
    engine = tts._loaded.engine
    deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
    while engine.num_sessions and time.monotonic() < deadline_s:
        time.sleep(0.01)
    gc.collect()
    return SoakReport(
        sessions=num_sessions,
        cancelled=totals.cancelled,
        frames=totals.frames,
        seconds=round(seconds, 1),
        rss_settled_mb=round(totals.rss_settled_mb, 1),
        rss_end_mb=round(psutil.Process().memory_info().rss / 1e6, 1),
        device_growth_mb=round(_device_mb() - totals.device_settled_mb, 1),
        threads_left=threading.active_count() - num_threads,
        tasks_left=tasks_left,
        sessions_left=engine.num_sessions,
        slots_free=engine.num_free_slots == engine.backend.num_slots,
    )


def main() -> None:
    """Prints the report; writes it with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--model", default="demo", help="demo (the default), a folder or a hub id")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--slots", type=int, default=8, help="streams at once (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    with TTS.load(options.model, options.device, slots=options.slots) as tts:
        report = soak(tts, options.sessions)
    uses_gpu = options.device != "cpu" and torch.cuda.is_available()
    content = (
        {"gpu": torch.cuda.get_device_name() if uses_gpu else None}
        | asdict(report)
        | {
            "slots": options.slots,
            "growth": round(report.growth, 4),
            "threads": torch.get_num_threads(),
        }
    )
    write(content, options.json, ("torch",))


if __name__ == "__main__":
    main()
