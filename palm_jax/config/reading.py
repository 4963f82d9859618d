"""Config files: YAML with a `base:`, and `section.key=value` over them, as plain data."""

from __future__ import annotations

import collections.abc
import json
import pathlib
import re
from typing import Any

import yaml

from palm_jax import files
from palm_jax.config.words import short
from palm_jax.errors import WrongInput

# Of a config file; and what may be in it, written out.
_MOST_BYTES, _MOST_VALUES = 2**18, 10_000
_MOST_BASES = 20  # one below the other


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers; a repeated key, a tag and aliases that multiply are errors."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[int, int] = {}  # by node: values in it, with all that aliases repeat

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()

        def refused(problem: str) -> yaml.composer.ComposerError:
            return yaml.composer.ComposerError(None, None, problem, event.start_mark)

        # SafeLoader's own tags run nothing, but it does not expect `!!int ""` or `!!bool x`.
        if getattr(event, "tag", None) is not None:
            raise refused(f"the tag {event.tag}: plain values have none")
        node = super().compose_node(parent, index)
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = self._size(node)
        if id(node) not in self._sizes:
            raise refused("an alias of what it lies within")
        if self._sizes[id(node)] > _MOST_VALUES:
            raise refused(f"there are more than {_MOST_VALUES:,} values")
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        inner = node.value
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        return 1 + sum(self._sizes[id(part)] for part in inner)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, collections.abc.Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {short(key)} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


# YAML 1.1 reads 1e-4 as text, 010 as eight, 1:30 as ninety and 2020-01-01 as a date.
for _kind in (_Loader, Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [
            (tag, form) for tag, form in rows if tag.rpartition(":")[2] in ("bool", "null", "merge")
        ]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
            r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )


def parse(text: str, where: str) -> Any:
    """Plain data: what JSON can hold, no part of it shared by two places (YAML's aliases)."""
    try:
        # A SafeLoader: it builds plain data only, and runs nothing.
        return json.loads(json.dumps(yaml.load(text, _Loader)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise WrongInput(f"{where} is not valid YAML: {error}") from None


def read(path: pathlib.Path, below: tuple[pathlib.Path, ...] = ()) -> dict[str, Any]:
    """Settings of a file over those of its base; `below` are the files that lead here."""
    try:
        text = files.text(path, _MOST_BYTES)
        own_place = path.resolve()
    # ValueError: not UTF-8, or a name that no file can have. RuntimeError: links in a circle.
    except (OSError, ValueError, RuntimeError) as error:
        raise WrongInput(f"cannot read the config {path}: {error}") from None
    if own_place in below:
        raise WrongInput(f"{path}: its base leads back to itself")
    if len(below) > _MOST_BASES:
        raise WrongInput(f"{path}: it is the base of a base, more than {_MOST_BASES} times over")
    settings = parse(text, str(path))
    if not isinstance(settings, dict):
        raise WrongInput(f"{path} must hold `section:` mappings, not {type(settings).__name__}")
    base = settings.pop("base", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise WrongInput(f"{path}: base={short(base)} must be the path of another config")
    return _merged(read(path.parent / base, (*below, own_place)), settings)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def apply_override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise WrongInput(f"override {short(override)} must have the form section.key=value")
    *sections, key = name.split(".")
    if len(sections) > 3:
        raise WrongInput(f"override {short(override)}: there are no settings that deep")
    place = settings
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise WrongInput(f"override {short(override)}: {section} holds a value, not a section")
        place = inner
    place[key] = parse(text, f"override {short(override)}")
