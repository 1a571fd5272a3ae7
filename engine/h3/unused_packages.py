"""Stand-ins for packages that SGLang imports and MiniMax-H3 never uses, for runs outside an image.

The images hold them. A machine without a container engine or a package index often does not: xgrammar (grammars of a
language model's output) is a wheel of 43 MB, IPython a tree of packages. Their names can be imported and raise when
they are called or made. Each one that was needed is named in the record.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

UNUSED = ("xgrammar", "IPython")


class Missing:
    """A name of a package that is not installed: a class, since SGLang annotates pydantic models with some."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__module__}.{type(self).__name__} was used, but {type(self).__module__.split('.')[0]} is not "
            "installed and MiniMax-H3 was not known to need it: install the package at its locked version"
        )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls)


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # questions of the import system and of inspect
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        made = type(name, (Missing,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of absent packages; asked last, so that an installed package comes first."""

    def __init__(self, roots: frozenset[str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.roots:
            return None
        return ModuleSpec(fullname, self, is_package=True, origin=__name__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> list[str]:
    """Stand in for those of the packages that are absent; returns their names for the record. Before SGLang is
    imported, and in every process that imports it."""
    names = [name for name in UNUSED if importlib.util.find_spec(name) is None]
    if names:
        sys.meta_path.append(_Finder(frozenset(names)))
    return [f"stand_in.{name}" for name in names]
