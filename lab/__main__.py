"""`python -m lab NAME ...`, in a clone of the repository."""

from lab.study import main
from vision_longhorn.command_line.parser import run_cli

run_cli(main, stopped="stopped; the same command goes on from here")
