"""`python -m mediamill` is the command line."""

from mediamill.cli import main

main(prog_name="mediamill")
