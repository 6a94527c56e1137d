"""Writes a page for each study's result: its question, tables, plot, and where its figures come from.

python -m lab.pages
"""

import json
from pathlib import Path
from typing import Any

from lab.plan import STUDIES
from lab.tables import markdown
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.settings import read_yaml

REPOSITORY = Path(__file__).parents[1]
RESULTS, PAGES = Path("benchmarks/results/study"), Path("docs/studies")


def page(name: str, content: dict[str, Any], with_plot: bool, in_file: bool) -> str:
    """Makes the page of the study `name` from its JSON. `in_file` says that lab/studies.yaml still has the study: one
    whose variants left the code has its settings in the record alone. Links are those of a file in `PAGES`."""
    links = "[what the columns mean](../study.md#the-tables) · [record]"
    links += f"(../../{RESULTS}/{name}.json) of each run, with its commit, machine and versions"
    if in_file:
        links = f"[Names and settings](../../lab/studies.yaml) · {links}"
    parts = [f"# Study `{name}`", content["asks"], links, markdown(content).rstrip("\n")]
    if with_plot:
        parts.append(f"![plot of {name}](../../{RESULTS}/{name}.png)")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Makes the page of each result of this repository, by its path there."""
    made, studies = {}, read_yaml(STUDIES)["studies"]
    for path in sorted((REPOSITORY / RESULTS).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        with_plot, in_file = path.with_suffix(".png").exists(), path.stem in studies
        made[PAGES / f"{path.stem}.md"] = page(path.stem, content, with_plot, in_file)
    return made


def main() -> None:
    """Writes all pages."""
    Parser(prog="python -m lab.pages", description=str(__doc__).partition("\n")[0]).parse_args()
    for path, text in pages().items():
        (REPOSITORY / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    run_cli(main)
