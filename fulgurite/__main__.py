"""`python -m fulgurite` is the `fulgurite` command."""

from fulgurite.cli import run

run()
