"""What is wrong with settings, in words that name the setting and the nearest that exists."""

from __future__ import annotations

import difflib
from typing import Any

import pydantic

from palm_jax.config.fields import Section
from palm_jax.config.words import cut, short

# Sections of several kinds, and the setting that says which.
TAGS = {"optimizer": "name", "schedule": "kind"}


def keys(model: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key there is, e.g. `model.width`."""
    found = []
    for name, field in model.model_fields.items():
        inner = [
            kind
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(kind, type) and issubclass(kind, Section)
        ]
        for kind in inner:
            found += keys(kind, f"{prefix}{name}.")
        if not inner:
            found.append(f"{prefix}{name}")
    return list(dict.fromkeys(found))


def explain(error: Any, there: list[str]) -> str:
    """A problem that pydantic found; `there`: every dotted key that exists."""
    # A discriminated union puts its tag into the location: optimizer.adamw.beta1.
    name = ".".join(
        str(part)
        for position, part in enumerate(error["loc"])
        if not (position == 1 and error["loc"][0] in TAGS)
    )
    if error["type"] == "extra_forbidden" and name in there:
        kind = error["loc"][1]
        return f"{name} is a setting of another kind of {error['loc'][0]} than {kind!r}"
    if error["type"] == "extra_forbidden":
        return f"there is no setting {cut(name)}{_nearest(name, there)}"
    if error["type"] == "json_invalid":
        return f"it holds text that is no Unicode, or is nested too deep ({error['msg']})"
    if error["type"] == "missing":
        return f"{name} is missing; set it in the file or with {name}=..."
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}" if name else str(error["ctx"]["error"])
    return f"{name}={short(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _nearest(name: str, there: list[str]) -> str:
    if len(name) > 200:
        return ""
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in there if key.rpartition(".")[2] == leaf]
    close = same_leaf or difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    if not close:
        by_leaf = {key.rpartition(".")[2]: key for key in there}
        close = [by_leaf[k] for k in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)]
    return f"; did you mean {close[0]}?" if close else ""
