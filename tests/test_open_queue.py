"""Sessions that are opened on an event loop: how many in an iteration, and in which order."""

import asyncio
import selectors
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts import TTS, EngineBusyError, Sampling, Session
from megakernel_tts.engine.pending_opens import PendingOpens
from megakernel_tts.open_queue import _MAX_OPENS, OpenQueue
from tests.fakes import TIMEOUT_S

SHORT = Sampling(seed=5, max_frames=2)


class CountingSelector(selectors.DefaultSelector):
    """A selector that counts the iterations of its event loop."""

    iteration = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.iteration += 1
        return super().select(timeout)


def run(selector: CountingSelector, main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on an event loop whose iterations are counted."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(main)


async def wait_iterations(count: int) -> None:
    """Returns after so many iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


class Opens:
    """Requests for sessions on one event loop; each is opened as its number.

    Attributes:
        pending: Sessions that the queue has announced.
        opened: Number of each session that was opened, and the iteration in which it was.
        refused: Numbers of sessions that cannot be opened.
    """

    def __init__(self) -> None:
        self.selector = CountingSelector()
        self.pending = PendingOpens(lambda: None)
        self.opened: list[tuple[int, int]] = []
        self.refused: set[int] = set()
        self._queue = OpenQueue(lambda: self.pending)

    async def open(self, number: int, iteration: int = 0) -> int:
        """Requests a session after so many iterations."""
        await wait_iterations(iteration)

        def open_session() -> Session:
            self.opened.append((number, self.selector.iteration))
            if number in self.refused:
                raise EngineBusyError("too many")
            return cast(Session, number)

        return cast(int, await self._queue.open(open_session))


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=40), st.integers(1, 8))
def test_few_sessions_are_opened_in_an_iteration_and_none_is_lost(
    requests: Sequence[tuple[int, bool]], cancelled_after: int
) -> None:
    """Requests arrive in any iterations; some are cancelled while they wait or before."""
    opens, results = Opens(), list[object]()

    async def main() -> None:
        tasks = [
            asyncio.create_task(opens.open(number, iteration))
            for number, (iteration, _) in enumerate(requests)
        ]
        await wait_iterations(cancelled_after)
        for task, (_, cancelled) in zip(tasks, requests, strict=True):
            if cancelled:
                task.cancel()
        results.extend(await asyncio.gather(*tasks, return_exceptions=True))

    run(opens.selector, main())
    per_iteration = Counter(iteration for _, iteration in opens.opened)
    assert max(per_iteration.values(), default=0) <= _MAX_OPENS
    numbers = [number for number, _ in opens.opened]
    assert numbers == sorted(numbers, key=lambda number: requests[number][0])  # first come first
    for number, (_, cancelled) in enumerate(requests):
        if not cancelled:
            assert numbers.count(number) == 1 and results[number] == number
        else:
            assert numbers.count(number) <= 1
    assert opens.pending.count == 0


def test_a_single_session_is_opened_at_once() -> None:
    opens = Opens()

    async def main() -> None:
        for number in range(3):
            request = opens.open(number)
            with pytest.raises(StopIteration) as stop:  # the coroutine ends without a wait
                request.send(None)
            assert stop.value.value == number
            await wait_iterations(3)

    run(opens.selector, main())


def test_every_iteration_opens_its_share_while_sessions_wait() -> None:
    opens = Opens()

    async def main() -> None:
        await asyncio.gather(*(opens.open(number) for number in range(1 + 3 * _MAX_OPENS)))

    run(opens.selector, main())
    iterations = [iteration for _, iteration in opens.opened]
    first = iterations[0]
    assert Counter(iterations) == {first: 1} | {first + i: _MAX_OPENS for i in (1, 2, 3)}


def test_the_engine_expects_the_sessions_that_wait() -> None:
    opens = Opens()

    async def main() -> None:
        tasks = [asyncio.create_task(opens.open(number)) for number in range(6)]
        await wait_iterations(1)
        assert opens.pending.count == 5 and len(opens.opened) == 1
        await asyncio.gather(*tasks)
        assert opens.pending.count == 0

    run(opens.selector, main())


def test_a_session_that_cannot_be_opened_does_not_delay_the_others() -> None:
    opens = Opens()
    opens.refused = {1, 3}

    async def main() -> None:
        requests = [opens.open(number) for number in range(1 + _MAX_OPENS)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        refused = {i for i, result in enumerate(results) if isinstance(result, EngineBusyError)}
        assert refused == opens.refused

    run(opens.selector, main())
    (_, first), *others = opens.opened
    assert {iteration for _, iteration in others} == {first + 1}


def test_event_loops_do_not_wait_for_each_other() -> None:
    """One loop stops while its sessions wait; the other opens all of its own."""
    queue, opened = OpenQueue(lambda: PendingOpens(lambda: None)), list[str]()

    def opener(name: str) -> Callable[[], Session]:
        return lambda: cast(Session, opened.append(name))

    async def leave() -> None:
        tasks.extend(asyncio.create_task(queue.open(opener("stopped"))) for _ in range(20))
        await wait_iterations(1)
        asyncio.get_running_loop().stop()

    async def stay() -> None:
        await asyncio.gather(*(queue.open(opener("other")) for _ in range(20)))

    tasks: list[asyncio.Task[Session]] = []
    stopped = asyncio.new_event_loop()
    started = stopped.create_task(leave())
    stopped.run_forever()
    assert opened == ["stopped"]
    thread = threading.Thread(target=asyncio.run, args=(stay(),), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the other event loop waits"
    assert opened == ["stopped"] + ["other"] * 20
    for task in tasks:
        task.cancel()
    stopped.run_until_complete(asyncio.gather(started, *tasks, return_exceptions=True))
    stopped.close()
    assert opened == ["stopped"] + ["other"] * 20


def test_streams_that_begin_together_are_opened_in_several_iterations(
    tts: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector, iterations = CountingSelector(), list[int]()
    open_session = tts.open

    def observed(*arguments: Any, **keywords: Any) -> Session:
        iterations.append(selector.iteration)
        return open_session(*arguments, **keywords)

    async def read() -> None:
        async for _ in tts.astream("Hello.", sampling=SHORT):
            pass

    async def main() -> None:
        await asyncio.gather(*(read() for _ in range(20)))

    monkeypatch.setattr(tts, "open", observed)
    run(selector, main())
    assert len(iterations) == 20 and max(Counter(iterations).values()) <= _MAX_OPENS
