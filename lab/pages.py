"""Writes a page for each study's result: its question, tables, plot, and where its figures come from.

python -m lab.pages
"""

import json
from pathlib import Path
from typing import Any

from lab.tables import markdown

REPOSITORY = Path(__file__).parents[1]
RESULTS, PAGES = Path("benchmarks/results/study"), Path("docs/studies")


def page(name: str, content: dict[str, Any], with_plot: bool) -> str:
    """Makes the page of the study `name` from its JSON. Links are those of a file in `PAGES`."""
    links = "[Names and settings](../../lab/studies.yaml) · [what the columns mean](../study.md#the-tables) · [record]"
    links += f"(../../{RESULTS}/{name}.json) of each run, with its commit, machine and versions"
    parts = [f"# Study `{name}`", content["asks"], links, markdown(content).rstrip("\n")]
    if with_plot:
        parts.append(f"![plot of {name}](../../{RESULTS}/{name}.png)")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Makes the page of each result of this repository, by its path there."""
    made = {}
    for path in sorted((REPOSITORY / RESULTS).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        made[PAGES / f"{path.stem}.md"] = page(path.stem, content, path.with_suffix(".png").exists())
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        (REPOSITORY / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
