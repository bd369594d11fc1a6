"""`outrider bench peers`: compare with other engines, each in its own process and environment.

`registry` lists the engines, `install` makes their environments, `export` writes the weights in the formats they read,
`process` talks to their processes (`workers/` holds the scripts that run there), `measure` runs the rounds, `report`
computes the figures.
"""
