"""Plugins by name: built-in ones are modules of a package, others come from entry points and load when named."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from gradtrack.errors import InputTypeError, PluginError, UnknownPluginError, UsageError
from gradtrack.support.redact import HIDDEN, redact

_NO_PLUGINS: Final = frozenset({"base", "tools"})
"""Modules of a plugin package that are no plugins."""
_HOOKS: Final = {
    "backends": ("write", "records"),
    "analyzers": ("inspect", "snapshot"),
    "alerts": ("send", "message"),
}
"""The method that a plugin of each kind must have, and its only argument."""
_COMMON_OPTIONS: Final = {"analyzers": ["every"], "alerts": ["min_severity"]}
"""The options that every plugin of a kind has, beside those of its own."""


class Registry:
    """The plugins of one kind, found by name without importing any of the others."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._group = f"gradtrack.{kind}"
        self._loaded: dict[str, type[Any]] = {}

    @property
    def singular(self) -> str:
        """Name the kind of one plugin."""
        return self.kind.removesuffix("s")

    def builtin(self) -> list[str]:
        """Name the plugins that are modules of gradtrack itself, each a file or a package of its own."""
        package = importlib.import_module(self._group)
        found = (module.name for module in pkgutil.iter_modules(package.__path__))
        return sorted(name for name in found if name not in _NO_PLUGINS and not name.startswith("_"))

    def names(self) -> list[str]:
        """Name every plugin that is installed."""
        return sorted({*self.builtin(), *(point.name for point in entry_points(group=self._group))})

    def check(self, name: str) -> None:
        """Raise `UnknownPluginError`, which names the nearest plugin, unless a plugin has this name."""
        if name not in self._loaded and name not in self.builtin() and name not in self.names():
            known = self.names()
            short = [one for one in known if _abbreviates(name, one) or _abbreviates(one, name)]
            close = nearest(name, known) or (f" Did you mean {short[0]!r}?" if len(short) == 1 else "")
            raise UnknownPluginError(f"unknown {self.singular} {name!r}: expected one of {', '.join(known)}.{close}")

    def load(self, name: str) -> type[Any]:
        """Return the class of the plugin of this name."""
        if name not in self._loaded:
            self.check(name)
            found = self._from_file(name) if name in self.builtin() else self._from_entry_point(name)
            self._loaded[name] = self.validate(name, found)
        return self._loaded[name]

    def load_for(self, name: str, options: Mapping[str, Any]) -> type[Any]:
        """Return the class of a plugin, having checked that its constructor takes these options.

        The parameter `model` of an analyzer is not an option: the training passes it.
        """
        found = self.load(name)
        signature = inspect.signature(found)
        known = [option for option in signature.parameters if option != "model"]
        common = [option for option in _COMMON_OPTIONS.get(self.kind, ()) if option not in known]
        known += common
        try:
            signature.bind(**{option: value for option, value in options.items() if option not in common})
        except TypeError as fault:
            wrong = next((option for option in options if option not in known), None)
            text = str(fault) if wrong is None else f"{wrong!r} is not an option"
            close = "" if wrong is None else nearest(str(wrong), known)
            expected = ", ".join(known) or "none"
            raise UsageError(f"{self.singular} {name!r}: {text}. Its options: {expected}.{close}") from fault
        return found

    def name_of(self, plugin: object) -> str:
        """Return the name of a plugin as a configuration has it.

        An instance has its `name`, or that of its file or its class.
        """
        named = split_spec(plugin, self.singular)
        if named is not None:
            return named[0]
        explicit = getattr(plugin, "name", None)
        if isinstance(explicit, str) and explicit:
            return explicit
        module = type(plugin).__module__
        if module.startswith(f"{self._group}."):
            return module.split(".")[2]
        return type(plugin).__name__.removesuffix(self.singular.capitalize()).lower() or type(plugin).__name__

    def validate(self, name: str, found: object) -> type[Any]:
        """Check the class of a plugin when a configuration names it, not in the middle of a training."""
        if not inspect.isclass(found):
            raise PluginError(f"{self.singular} {name!r} is {found!r}: expected a class. Point the entry point to one.")
        hook, argument = _HOOKS[self.kind]
        method, named = getattr(found, hook, None), f"{self.singular} {name!r} ({found.__qualname__})"
        if not callable(method):
            raise PluginError(f"{named} has no method {hook!r}: expected {hook}(self, {argument}). Define it.")
        signature = inspect.signature(method)
        try:
            signature.bind(None, None)
        except TypeError as fault:
            raise PluginError(
                f"{named} has {hook}{signature}: expected 1 argument after self ({fault}). Change its signature."
            ) from fault
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise PluginError(f"{named} leaves {missing} undefined. Define it.")
        return found

    def _from_file(self, name: str) -> type[Any]:
        module = importlib.import_module(f"{self._group}.{name}")
        base = getattr(importlib.import_module(f"{self._group}.base"), self.singular.capitalize())
        found = [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise PluginError(f"{module.__name__} holds {len(found)} {self.kind}: expected exactly one class.")
        return found[0]

    def _from_entry_point(self, name: str) -> object:
        point = next(point for point in entry_points(group=self._group) if point.name == name)
        try:
            return point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # a plugin that exits the interpreter on import must not end the training
            package = point.dist.name if point.dist is not None else point.value
            raise PluginError(
                f"{self.singular} {name!r} of {package} failed to load: {redact(repr(fault))}. "
                f"Repair or uninstall that package, or take {name!r} out of the configuration."
            ) from fault


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return a sentence with the known name that was probably meant, else an empty text."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def _abbreviates(short: str, long: str) -> bool:
    """Whether a text is the first letter of another and some of the later ones, in order, as tb is of TensorBoard."""
    letters, left = [one for one in short.lower() if one.isalnum()], iter(long.lower())
    return len(letters) > 1 and letters[0] == long[:1].lower() and all(letter in left for letter in letters)


def split_spec(spec: object, kind: str) -> tuple[str, dict[str, Any]] | None:
    """Take a plugin's name and options from a name or a mapping; None stands for an instance."""
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise InputTypeError(
                f"{kind} {shown(spec, kind)}: expected a 'name' among its keys. Write {{name: ..., option: value}}."
            )
        return name, options
    return None


def shown(spec: object, kind: str) -> str:
    """Return a text for a plugin of a configuration without its secrets, which every option of an alert may be."""
    if kind == "alert" and not isinstance(spec, str):
        return repr(dict.fromkeys(spec, HIDDEN)) if isinstance(spec, Mapping) else type(spec).__name__
    return redact(repr(spec))


backends = Registry("backends")
analyzers = Registry("analyzers")
alerts = Registry("alerts")
