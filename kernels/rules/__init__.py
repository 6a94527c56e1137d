"""The update rules, one file for each family, and their names.

A rule is all that distinguishes one scan from another: see `base.Rule`. docs/scan.md has the mathematics,
CONTRIBUTING.md how to add one.
"""

from functools import cache
from importlib import import_module

from ..contract import Scan, check_option
from .base import Rule

# A rule's file is imported, and with it Triton if installed, when the rule is first asked for.
_FILES = {"diagonal": "longhorn", "exact": "longhorn", "mamba": "mamba", "delta": "delta", "gla": "gla",
          "diagonal_unit": "longhorn"}  # fmt: skip
NAMES = tuple(_FILES)


@cache
def get_rule(name: str) -> Rule:
    """Return the rule called `name`. Raises ValueError if there is none."""
    check_option("rule", name, NAMES)
    return next(rule for rule in import_module(f".{_FILES[name]}", __name__).RULES if rule.name == name)


def rule_of(scan: Scan) -> Rule:
    """Return the rule that computes `scan`. With one state "exact" equals "diagonal", whose form loses no digits where
    a large key all but erases the state."""
    return get_rule("diagonal" if scan.rule == "exact" and scan.k.shape[-1] == 1 else scan.rule)
