"""`python -m octavo` and `torchrun -m octavo`: the `octavo` command."""

from octavo.cli import main

main()
