"""Tasks that `hpctrain init` copies: one file for each framework and kind of program, complete, with made-up data."""
