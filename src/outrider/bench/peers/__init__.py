"""`outrider bench peers`: compare with other engines, each in its own process and environment.

`registry` lists the engines, `environment` installs them and talks to their processes (`worker` is the script that runs
there), `export` writes the weights in the formats they read, `measure` runs the rounds, `report` computes the figures.
"""
