"""Public names of a package that are imported at their first use."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Makes the `__getattr__` of a package.

    Args:
        package: Its name.
        modules: Names of public objects, by the module that defines them.
    """
    owners = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import_module("megakernel_common.process")  # first: it notes whether torch was imported
        return getattr(import_module(owners[name]), name)

    return get
