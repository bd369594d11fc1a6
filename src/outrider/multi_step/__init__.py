"""Multi-step decoding: several decode steps on the device without the host in between.

- state: `DecodeState`, the requests on the device, and the interface of a drafter that runs on it
- planner: how many tokens to draft in a run, how many steps it has, and what to learn from it
- loop: the run itself; progress: reading its outputs while later steps run
- processing: logits processors, banned words, grammar masks and log-probabilities of runs
- drafting: drafts after a step with the host, by the CUDA graphs of runs
"""
