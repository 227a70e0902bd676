"""How rows reach the model. Each layout is `logprobs(model, examples, *, device, temperature) -> [N]`, in their order.

plain   one padded row an example: right for every model, and the reference the others are compared with (probe.py)
fork    the beginning that rows of a group share is read once, and its cache, with gradient, goes to each of them
packed  one row a group: the shared beginning, then each one's own rest, kept apart by a mask

Axes: N trained tokens · B examples · L the longest row · F families (families.py) · P the longest shared beginning · S the
longest rest · W the longest packed row · M positions that predict a trained token.
"""

from . import fork, packed, plain

BY_NAME = {"plain": plain.logprobs, "fork": fork.logprobs, "packed": packed.logprobs}
