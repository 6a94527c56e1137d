"""The update rules, one file for each family, and their names.

A rule is all that distinguishes one scan from another: see `base.Rule`. Everything else (walking through time, loading,
gates, sums, dispatch, autograd) asks the rule. docs/scan.md has the mathematics, CONTRIBUTING.md how to add one.
"""

from functools import cache
from importlib import import_module

from ..contract import Scan
from .base import Rule

# Name: file. A file is imported, and with it Triton where there is one, when its rule is first asked for.
_FILES = {"diagonal": "longhorn", "exact": "longhorn", "mamba": "mamba", "delta": "delta", "gla": "gla",
          "diagonal_unit": "longhorn"}  # fmt: skip
NAMES = tuple(_FILES)

__all__ = ["NAMES", "Rule", "get_rule", "rule_of"]


@cache
def get_rule(name: str) -> Rule:
    """The rule called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in _FILES:
        raise ValueError(f"rule={name!r} is not known; choose one of {', '.join(map(repr, NAMES))}")
    return next(rule for rule in import_module(f".{_FILES[name]}", __name__).RULES if rule.name == name)


def rule_of(scan: Scan) -> Rule:
    """The rule by which `scan` is computed: not always the one it names, see `Rule.for_states`."""
    return get_rule(scan.rule).for_states(scan.k.shape[-1])
