"""TOML and ``--section.key value`` on top of a registry function's config, strictly.

Every value keeps its origin, so that an error names file or flag, key, value and remedy. The config is built anew from
the final values, so each section's own checks see those.
"""

import difflib
import importlib
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import tomli
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from mula_titan.components.activation_checkpoint import FullAC, SelectiveAC

AC_SECTION = "activation_checkpoint"
AC_MODES: dict[str, type | None] = {
    "none": None,
    "full": FullAC.Config,
    "selective": SelectiveAC.Config,
    "memory_budget": MemoryBudgetAC.Config,
}
"""Values of ``activation_checkpoint.mode``; torchtitan chooses by class."""

INTERNAL = {"model_spec", "param_init", "sharding_config", "trace_post_processor"}
"""Fields that hold objects rather than values; they are set by code."""


class ConfigError(ValueError):
    """The user's configuration cannot work; the message says what, where and what to do."""


class Values:
    """Nested values with the origin of each: a TOML file, then flags, which win."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        self._text: dict[str, str] = {}

    def add_file(self, path: Path) -> None:
        """Read a TOML file.

        Raises:
            ConfigError: no such file, or not TOML.
        """
        try:
            with path.open("rb") as file:
                tree = tomli.load(file)
        except FileNotFoundError:
            nearby = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
            hint = f" Files there: {', '.join(nearby)}." if nearby else ""
            raise ConfigError(f"{path}: no such configuration file.{hint}") from None
        except tomli.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        self._merge(self.tree, tree, str(path), "")

    def add_flags(self, flags: list[str]) -> None:
        """Read ``--section.key value``, ``--section.key=value`` and, for true, a bare ``--section.key``.

        Raises:
            ConfigError: a word that is no flag.
        """
        rest = list(flags)
        while rest:
            flag = rest.pop(0)
            if not flag.startswith("--"):
                raise ConfigError(f"unexpected argument {flag!r}: values are given as --section.key value")
            key, equals, text = flag[2:].partition("=")
            if not equals:
                text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            key = key.replace("-", "_")
            tree: Any = _parse_text(text)
            for part in reversed(key.split(".")):
                tree = {part: tree}
            self._merge(self.tree, tree, "command line", "")
            self._text[key] = text

    def origin(self, key: str) -> str:
        """File or command line that set a key; the defaults if none did."""
        return self._origin.get(key, "defaults")

    def text(self, key: str) -> str | None:
        """The word that set a key on the command line; None if a file or nothing set it."""
        return self._text.get(key)

    def _merge(self, into: dict[str, Any], new: dict[str, Any], origin: str, prefix: str) -> None:
        for name, value in new.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and isinstance(into.get(name, {}), dict):
                self._merge(into.setdefault(name, {}), value, origin, f"{key}.")
            else:
                into[name] = value
            self._origin[key] = origin
            self._text.pop(key, None)


def _parse_text(text: str) -> Any:
    """A flag's value: a TOML value if it is one, else the text itself."""
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def load_config(path: Path | str | None, flags: list[str] | None = None) -> tuple[Any, Values]:
    """Build the config of a run.

    Args:
        path: TOML file. Its top-level ``config`` names a function in ``module``'s config registry (default:
            mula_titan's function called like ``model.flavor``).
        flags: ``--section.key value`` words, which override the file.

    Returns:
        A built ``Trainer.Config`` and the values with their origins.

    Raises:
        ConfigError: anything that cannot work, in one message.
    """
    values = Values()
    if path is not None:
        values.add_file(Path(path))
    values.add_flags(flags or [])
    tree = dict(values.tree)
    module = tree.pop("module", "mula_titan")
    model = tree.get("model")
    name = tree.pop("config", model.get("flavor") if isinstance(model, dict) else None)
    if name is None:
        raise ConfigError(
            f'{path or "command line"}: say which model to train: [model] flavor = "mula_debug", for example'
        )
    config = _registry_function(module, name, values)()
    return overlay(config, tree, values), values


def _registry_function(module: str, name: str, values: Values) -> Any:
    """A function of a config registry, found as torchtitan's ``--module`` and ``--config`` find it."""
    if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{values.origin('module')}: module = {module!r}: expected the name of a Python module")
    try:
        registry = importlib.import_module(f"{module}.config_registry")
    except ModuleNotFoundError as error:
        if error.name not in (module, f"{module}.config_registry"):
            raise  # the registry exists and its own import is what failed
        try:
            registry = importlib.import_module(module)
        except ModuleNotFoundError:
            raise ConfigError(f"{values.origin('module')}: module = {module!r}: no such Python module") from None
    known = [
        key
        for key, value in vars(registry).items()
        if isinstance(value, types.FunctionType) and value.__module__ == registry.__name__ and not key.startswith("_")
    ]
    if name not in known:
        key = "config" if "config" in values.tree else "model.flavor"
        raise ConfigError(f"{values.origin(key)}: {key} = {name!r}: {_choose(name, known)}")
    return getattr(registry, name)


def _choose(name: Any, known: list[str]) -> str:
    longer = [other for other in known if name and other.startswith(str(name))]
    close = longer or difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(map(repr, known))}"


def settable_fields(config: Any) -> dict[str, Any]:
    """Names of a config's fields that TOML and flags may set, and their types."""
    hints = typing.get_type_hints(type(config))
    names = [f.name for f in fields(config) if f.init and f.name not in INTERNAL and not f.name.startswith("_")]
    return {name: hints[name] for name in names}


def overlay(config: Any, tree: dict[str, Any], values: Values, prefix: str = "") -> Any:
    """A new dataclass of the same type with the values of ``tree`` in place of its own.

    A class may have ``problems()``, (field, value, what to do) of each field that cannot work, as
    :class:`mula_titan.model.MulaArgs` has.

    Raises:
        ConfigError: unknown keys, wrong types, values that the class itself refuses; all of a section at once.
    """
    hints = settable_fields(config)
    errors = [_unknown(f"{prefix}{name}", name, list(hints), values) for name in tree if name not in hints]
    kwargs = {}
    for field in fields(config):
        if not field.init:
            continue
        current, key = getattr(config, field.name), f"{prefix}{field.name}"
        if field.name in tree and field.name in hints:
            try:
                kwargs[field.name] = _convert(tree[field.name], hints[field.name], current, key, values)
            except ConfigError as error:
                errors.append(str(error))
        elif field.default is not MISSING or field.default_factory is not MISSING or current is not None:
            kwargs[field.name] = current
    if errors:
        raise ConfigError("\n".join(errors))
    try:
        result = type(config)(**kwargs)
    except (ValueError, AssertionError, NotImplementedError) as error:
        section = prefix.rstrip(".") or "configuration"
        where = {values.origin(f"{prefix}{name}") for name in tree} or {"defaults"}
        raise ConfigError(f"{', '.join(sorted(where))}: [{section}]: {error}") from None
    problems = result.problems() if hasattr(result, "problems") else []
    if problems:
        raise ConfigError(
            "\n".join(
                f"{values.origin(f'{prefix}{name}')}: {prefix}{name} = {value!r}: {remedy}"
                for name, value, remedy in problems
            )
        )
    return result


def _unknown(key: str, name: str, known: list[str], values: Values) -> str:
    prefix = key[: len(key) - len(name)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"did you mean {prefix}{close[0]}?" if close else f"keys there: {', '.join(known)}"
    return f"{values.origin(key)}: unknown key {key}: {remedy}"


def _convert(value: Any, hint: Any, current: Any, key: str, values: Values) -> Any:
    """The value as the field's type asks for it."""
    if key == AC_SECTION:
        return _activation_checkpoint(value, current, values)
    if is_dataclass(current) and not isinstance(current, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{values.origin(key)}: {key} = {value!r}: this is a section; set [{key}] with keys")
        return overlay(current, value, values, f"{key}.")
    problem, result = _match(value, hint, key, values)
    if problem and (text := values.text(key)) is not None:
        problem, result = _match(text, hint, key, values)  # --dump_folder 2024 is a name, not a number
    if problem:
        raise ConfigError(f"{values.origin(key)}: {key} = {value!r}: expected {problem}")
    return result


def _activation_checkpoint(value: Any, current: Any, values: Values) -> Any:
    """``[activation_checkpoint]``: ``mode`` chooses the class, the other keys are its fields."""
    tree = dict(value) if isinstance(value, dict) else {"mode": value}
    mode = tree.pop("mode", None)
    key = f"{AC_SECTION}.mode"
    if mode is not None:
        if mode not in AC_MODES:
            raise ConfigError(f"{values.origin(key)}: {key} = {mode!r}: {_choose(mode, list(AC_MODES))}")
        config_class = AC_MODES[mode]
        if not isinstance(current, config_class or type(None)):
            current = config_class() if config_class else None
    if current is None:
        if tree:
            origin = values.origin(AC_SECTION)
            raise ConfigError(f"{origin}: [{AC_SECTION}] sets {', '.join(sorted(tree))}, but its mode is 'none'")
        return None
    return overlay(current, tree, values, f"{AC_SECTION}.")


def _match(value: Any, hint: Any, key: str, values: Values) -> tuple[str | None, Any]:
    """(what was expected, or None if the value fits; the value in that type)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None, value
    if origin is typing.Annotated:
        return _match(value, args[0], key, values)
    if origin in (Union, types.UnionType):
        if type(None) in args and value in (None, "none"):
            return None, None  # TOML has no null
        expected = []
        for option in args:
            problem, result = _match(value, option, key, values)
            if not problem:
                return None, result
            expected.append(problem)
        return " or ".join(dict.fromkeys(expected)), None
    if hint is type(None):
        return '"none"', None
    if origin is Literal:
        return (None, value) if value in args else (f"one of {', '.join(map(repr, args))}", None)
    if origin in (list, tuple):
        return _match_sequence(value, origin, args, key, values)
    if origin is dict or hint is dict:
        return (None, value) if isinstance(value, dict) else ("a table", None)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            return "a table", None
        return None, _new(hint, value, values, key)
    if hint is float:
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        return (None, float(value)) if ok else ("a number", None)
    if hint is int:
        return (None, value) if isinstance(value, int) and not isinstance(value, bool) else ("a whole number", None)
    if hint is bool:
        return (None, value) if isinstance(value, bool) else ("true or false", None)
    if hint is str:
        return (None, value) if isinstance(value, str) else ("a string", None)
    return f"nothing: {key} is set by code", None


def _match_sequence(value: Any, kind: type, args: tuple, key: str, values: Values) -> tuple[str | None, Any]:
    if isinstance(value, str) and args and args[0] is str:
        value = value.split(",")  # --section.key a,b as torchtitan's command line has it
    if not isinstance(value, list):
        return "a list", None
    if kind is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            return f"a list of {len(args)}", None
        hints = list(args)
    else:
        hints = [args[0] if args else Any] * len(value)
    result = []
    for item, item_hint in zip(value, hints, strict=True):
        problem, converted = _match(item, item_hint, key, values)
        if problem:
            return f"a list of {problem}", None
        result.append(converted)
    return None, kind(result)


def _new(cls: Any, tree: dict[str, Any], values: Values, key: str) -> Any:
    """A dataclass from a table, for lists of tables."""
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    for name in tree:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedy = f"did you mean {close[0]}?" if close else f"keys there: {', '.join(known)}"
            raise ConfigError(f"{values.origin(key)}: unknown key {name} in {key}: {remedy}")
    missing = [
        f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING and f.name not in tree
    ]
    if missing:
        raise ConfigError(f"{values.origin(key)}: {key} lacks {', '.join(missing)}")
    kwargs = {}
    for name, value in tree.items():
        problem, kwargs[name] = _match(value, hints[name], f"{key}.{name}", values)
        if problem:
            raise ConfigError(f"{values.origin(key)}: {key}.{name} = {value!r}: expected {problem}")
    return cls(**kwargs)
