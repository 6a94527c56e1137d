"""Makes the page that a package index shows out of README.md; all else stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# An index has no other file of this repository, so a picture goes and a link to a file becomes its text.
page = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", page, flags=re.M)
page = re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", page)
page += "\nThe source distribution holds all documents, examples and configs that this page names.\n"

setup(long_description=page, long_description_content_type="text/markdown")
