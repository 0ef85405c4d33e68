"""The settings in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# What a run does not have.
MISSING = "–"


def find_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The settings that are not the same in all configs, with the value in each.

    >>> find_differences([{"width": 8, "seed": 0}, {"width": 8, "seed": 1, "limit": 10}])
    {'limit': ['–', '10'], 'seed': ['0', '1']}

    Args:
        configs: the contents of `config.json` of each run; groups of settings may be nested.
    """
    flat = [_flatten(config) for config in configs]
    names = sorted({name for config in flat for name in config})
    values = {name: [config.get(name, MISSING) for config in flat] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found[f"{prefix}{name}"] = text
    return found
