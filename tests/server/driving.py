"""What a user does with the web page, in a real browser."""

from collections.abc import Callable, Coroutine
from typing import Any

from tests.browser import CONTROL, BrowserPage, Page
from tests.server.running import RunningServer

Drive = Callable[[Callable[[Page], Coroutine[Any, Any, None]]], None]

STATE = "document.querySelector('#speech-state').textContent"


async def open_page(page: BrowserPage, server: RunningServer) -> None:
    """Opens the page and waits until text can be typed."""
    await page.open(server.url)
    await page.wait_until("document.activeElement?.id === 'text'")


async def open_with_key(page: BrowserPage, server: RunningServer, key: str) -> None:
    """Opens the page of a server with keys, and enters one."""
    await page.open(server.url)
    await wait_for_key_form(page)
    await page.type(key)
    await page.press("Enter")


async def wait_for_key_form(page: BrowserPage) -> None:
    """Waits until a key can be typed."""
    await page.wait_until("document.activeElement?.id === 'key'")


async def finish(page: BrowserPage) -> None:
    """Ends the turn and receives it to its end."""
    await page.press("Enter", CONTROL)
    await page.wait_until(f"{STATE}.startsWith('Finished')")


async def text_of(page: BrowserPage, selector: str) -> str:
    """The text of an element."""
    return await page.run(f"document.querySelector({selector!r}).textContent")


def assert_in_order(shown: list[str], text: str) -> None:
    """A busy browser may draw no frame while a short word is spoken, but never another order."""
    words = iter(text.split())
    assert len(shown) >= 2 and all(word in words for word in shown), shown
