"""`python -m vision_longhorn COMMAND ...`, and with it `accelerate launch -m vision_longhorn train ...`."""

from vision_longhorn.command_line.commands import main

main()
