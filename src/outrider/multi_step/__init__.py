"""Multi-step decoding: several decode steps on the device without the host in between.

- state: `DecodeState`, the requests on the device, and the interface of a drafter that runs on it
- planner: how many tokens to draft in a run, and what to learn from it
- loop: the run itself, and how many steps it has
"""
