"""Text filters and text transforms of a service: where a text may be divided between groups.

Pipecat applies them to each group of words alone. A group must therefore end where they make the
same of both sides as of the whole: neither within `**bold words**` nor in "5 km".
"""

import re
from collections import Counter
from copy import deepcopy

from loguru import logger
from pipecat.services.tts_service import TTSService
from pipecat.utils.text.base_text_aggregator import TextType
from pipecat.utils.text.base_text_filter import BaseTextFilter

# Ends of markup and what begins it. The end may not have been written yet.
_OPENERS = {mark: mark for mark in ("*", "**", "***", "_", "__", "___", "`", "```", "~~", "~~~")}
_OPENERS |= {"](x)": "[", "]": "[", ")": "(", "}": "{", ">": "<"}
_TAG = re.compile(r"<(\w+)")
_CODE_BLOCK = re.compile(r"```[\s\S]*?(?:```|$)|~~~[\s\S]*?(?:~~~|$)")
_WHOLE_TAG = re.compile(r"<(/?)(\w+)[^<>]*(?<!/)>")
_SENTENCE_END = re.compile(r"[.!?…。！？｡][\"'”’»)\]}」』）】]*\s*$")


class TextRewriting:
    """What a service's filters and transforms make of text. They are called on copies of filters.

    Transforms are called several times with the same text. If a filter cannot be copied, text is
    divided between sentences.
    """

    def __init__(self, service: TTSService) -> None:
        """Reads the filters and transforms of a service at each call, since they may change.

        Args:
            service: The service.
        """
        self._service = service
        self._uncopyable: BaseTextFilter | None = None  # that was reported

    @property
    def active(self) -> bool:
        """Whether the service has a filter or a transform."""
        return bool(self._service._text_filters or self._service._text_transforms)

    def block_end(self, text: str) -> int:
        """Index after the last block of code or pair of tags; the text's end if it is not closed.

        Such a block may have any length, unlike other markup.

        Args:
            text: Text that was not released.
        """
        tags = [*_WHOLE_TAG.finditer(text)]
        num_open = Counter[str]()
        for tag in tags:
            num_open[tag[2]] += -1 if tag[1] else 1
        if any(num > 0 for num in num_open.values()):
            return len(text)
        return max((block.end() for block in [*tags, *_CODE_BLOCK.finditer(text)]), default=0)

    async def may_divide(self, text: str, end: int) -> bool:
        """Whether the groups before and after a boundary are rewritten as the whole text is.

        Args:
            text: Text that was not released, from its start.
            end: Index of the first character after the boundary.
        """
        groups = text[:end], text[end:]
        if not self._copyable():
            return bool(_SENTENCE_END.search(groups[0]))
        try:
            whole, divided = await self._rewrite(text), await self._rewrite(*groups)
            if whole != divided or not await self._is_closed(*groups):
                return False
            # A mark that begins a group means something else (`* a` is an item of a list): no group
            # begins with words that are removed.
            return not groups[1].strip() or bool(await self._rewrite(groups[1]))
        except Exception:  # the application's; Pipecat reports it when the text is spoken
            return False

    def _copyable(self) -> bool:
        """Whether the filters can be copied; logs a warning if not."""
        for text_filter in self._service._text_filters:
            try:
                deepcopy(text_filter)
            except Exception as error:  # of the application's class
                if self._uncopyable is not text_filter:
                    self._uncopyable = text_filter
                    logger.warning(
                        f"{type(text_filter).__name__} cannot be copied ({error}), so that text is "
                        "spoken sentence by sentence; give the filter a __deepcopy__ method, or "
                        "use text_transforms instead."
                    )
                return False
        return True

    async def _is_closed(self, before: str, after: str) -> bool:
        """Whether further text that ends markup cannot join the groups around a boundary."""
        text = before + after
        closers = [closer for closer, opener in _OPENERS.items() if opener in text]
        closers += {f"</{name}>" for name in _TAG.findall(text)}
        rests = [f"x{closer}." for closer in closers]
        rests += [  # the text may end within the mark
            f"{closer[k:]}."
            for closer in closers
            for k in range(1, len(closer))
            if text.endswith(closer[:k])
        ]
        for rest in rests:
            if await self._rewrite(text + rest) != await self._rewrite(before, after + rest):
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
