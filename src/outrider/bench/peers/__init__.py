"""`outrider bench peers`: other engines beside ours on this machine, each in a process and an environment of its own.

`roster` says who they are, `setup` installs them, `models` writes the weights as they read them, `child` talks to the
processes (`workers/` is what runs in them), `race` goes through the rounds, `report` makes figures of them.
"""
