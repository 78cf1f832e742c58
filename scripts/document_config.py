#!/usr/bin/env python3
"""Write the tables of all configuration keys into docs/configuration.md, and their list into tests/config/keys.txt.

Run it after a change of any config class: ``python scripts/document_config.py``. Types and defaults come from the
classes, and so do descriptions of our own keys (the string below a field); scripts/torchtitan_keys.toml has the others.
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import tomli

from mula_titan import config_registry  # first: it lets torchtitan run on a CPU
from mula_titan.data.loader import TokenSource
from mula_titan.toml_config import AC_MODES, AC_SECTION, settable_fields

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
KEYS = ROOT / "tests" / "config" / "keys.txt"
TORCHTITAN_KEYS = ROOT / "scripts" / "torchtitan_keys.toml"
BEGIN, END = "<!-- keys: scripts/document_config.py -->", "<!-- end of keys -->"

SECTIONS = ("model", "training", "optimizer", "lr_scheduler", "dataloader", "parallelism", AC_SECTION, "compile")
"""Sections that come first in the page; the others follow in the config's order."""


class Key(NamedTuple):
    """One key that a TOML file or a flag can set."""

    name: str
    """With its section: ``training.steps``."""
    hint: Any
    default: Any
    text: str
    """What it means."""


def keys_of(config: Any, prefix: str = "") -> Iterator[Key]:
    """Every key of a config tree, depth first."""
    for name, hint in settable_fields(config).items():
        value = getattr(config, name)
        if prefix + name == AC_SECTION:
            yield from activation_checkpoint_keys()
        elif is_dataclass(value):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield Key(prefix + name, hint, value, meaning(type(config), name, prefix))


def activation_checkpoint_keys() -> Iterator[Key]:
    """``activation_checkpoint.mode``, which chooses the class, and the fields of all classes."""
    text = torchtitan_text(f"{AC_SECTION}.mode")
    yield Key(f"{AC_SECTION}.mode", Literal[tuple(AC_MODES)], "none", text)
    seen: dict[str, Key] = {}
    for config_class in AC_MODES.values():
        for key in keys_of(config_class(), f"{AC_SECTION}.") if config_class else ():
            seen.setdefault(key.name, key)
    yield from seen.values()


def all_keys() -> list[Key]:
    """Keys of all registry functions; defaults are those of ``mula_7b_a1b``."""
    keys: dict[str, Key] = {}
    for config in (config_registry.mula_7b_a1b(), config_registry.mula_debug()):  # the loss of the latter isn't chunked
        for key in keys_of(config):
            keys.setdefault(key.name, key)
    return list(keys.values())


def meaning(cls: type, field: str, prefix: str) -> str:
    """What a key means: the string below the field if the class is ours, else the text in torchtitan_keys.toml."""
    owner = next(c for c in cls.__mro__ if field in inspect.get_annotations(c))
    if not owner.__module__.startswith("mula_titan."):
        return torchtitan_text(prefix + field)
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and node.target.id == field and isinstance(following, ast.Expr):
            return " ".join(ast.literal_eval(following.value).split())
    return ""


def torchtitan_text(name: str) -> str:
    """The text of a key in torchtitan_keys.toml; "" if it lacks one."""
    tree = _torchtitan_texts()
    for part in name.split("."):
        tree = tree.get(part, {})
    return tree or ""


@cache
def _torchtitan_texts() -> dict[str, Any]:
    return tomli.loads(TORCHTITAN_KEYS.read_text(encoding="utf-8"))


def type_text(hint: Any) -> str:
    """A type as a TOML writer thinks of it."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f'`"{value}"`' for value in args)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys('`"none"`' if arg is type(None) else type_text(arg) for arg in args))
    if is_dataclass(hint) or typing.get_origin(hint) is dict:
        return "table"
    if typing.get_origin(hint) in (list, tuple):
        return "list"
    return {int: "int", float: "float", bool: "bool", str: "string"}[hint]


def value_text(value: Any) -> str:
    """A default as TOML."""
    if value is None:
        return '`"none"`'
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, list):
        return f"`[{', '.join(value_text(item).strip('`') for item in value)}]`"
    return f"`{str(value).lower()}`" if value != {} else ""


def tables() -> str:
    """The key tables of all sections."""
    rows: dict[str, list[str]] = {section: [] for section in ("", *SECTIONS)}
    for key in all_keys():
        section, _, name = key.name.rpartition(".")
        row = f"| `{name}` | {type_text(key.hint)} | {value_text(key.default)} | {key.text} |"
        rows.setdefault(section, []).append(row)
    # One entry of a list of tables.
    for name, hint in settable_fields(TokenSource()).items():
        row = f"| `{name}` | {type_text(hint)} | {value_text(getattr(TokenSource(), name))} | "
        rows.setdefault("[dataloader.sources]", []).append(row + meaning(TokenSource, name, "") + " |")
    head = "| key | type | default | meaning |\n|--|--|--|--|\n"
    parts = []
    for section, lines in rows.items():
        title = f"`[{section}]`" if section else "Top of the file"
        parts.append(f"### {title}\n\n{head}" + "\n".join(lines))
    return "\n\n".join(parts)


def page(old: str) -> str:
    """The page with its tables made anew."""
    before, rest = old.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def key_list() -> str:
    """All keys, one a line."""
    return "".join(sorted(f"{key.name}\n" for key in all_keys()))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    KEYS.write_text(key_list(), encoding="utf-8")
