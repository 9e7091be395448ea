"""Text filters and text transforms of a service: where a text may be divided between groups.

Pipecat applies them to each group of words alone. A group must therefore end where they make the
same of both sides as of the whole: neither within `**bold words**` nor in "5 km".
"""

import re
from copy import deepcopy

from pipecat.services.tts_service import TTSService
from pipecat.utils.text.base_text_aggregator import TextType

# Ends of markup and what begins it. The end may not have been written yet.
_OPENERS = {mark: mark for mark in ("*", "**", "***", "_", "__", "___", "`", "```", "~~", "~~~")}
_OPENERS |= {"](x)": "[", "]": "[", ")": "(", "}": "{", ">": "<"}
_TAG = re.compile(r"<(\w+)")


class TextRewriting:
    """What a service's filters and transforms make of text. They are called on copies of filters.

    Transforms are called several times with the same text.
    """

    def __init__(self, service: TTSService) -> None:
        """Reads the filters and transforms of a service at each call, since they may change.

        Args:
            service: The service.
        """
        self._service = service

    @property
    def active(self) -> bool:
        """Whether the service has a filter or a transform."""
        return bool(self._service._text_filters or self._service._text_transforms)

    async def may_divide(self, text: str, end: int) -> bool:
        """Whether groups that meet at a boundary are rewritten as the whole text is.

        Args:
            text: Text that was not released, from its start.
            end: Index of the first character after the boundary.
        """
        groups = text[:end], text[end:]
        try:
            whole, divided = await self._rewrite(text), await self._rewrite(*groups)
            return whole == divided and await self._is_closed(groups[0])
        except Exception:  # the application's; Pipecat reports it when the text is spoken
            return False

    async def _is_closed(self, text: str) -> bool:
        """Whether no markup that text after it could end changes how it is rewritten."""
        closers = [closer for closer, opener in _OPENERS.items() if opener in text]
        closers += {f"</{name}>" for name in _TAG.findall(text)}
        rewritten = await self._rewrite(text) if closers else ""
        for closer in closers:
            if not (await self._rewrite(f"{text}x{closer}")).startswith(rewritten):
                return False
        return True

    async def _rewrite(self, *groups: str) -> str:
        """What successive groups are rewritten to, with single spaces."""
        filters = deepcopy(self._service._text_filters)
        rewritten = ""
        for group in groups:
            text = group.lstrip("\n")  # as Pipecat does
            if not text.strip():
                continue
            for text_filter in filters:
                await text_filter.reset_interruption()
                text = await text_filter.filter(text)
            for text_type, transform in self._service._text_transforms:
                if text_type in (TextType.SENTENCE, "*"):
                    text = await transform(text, TextType.SENTENCE)
            rewritten += text.strip() + (" " if group[-1].isspace() else "")
        return " ".join(rewritten.split())
