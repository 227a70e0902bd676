"""How rows reach the model. Each layout is `logprobs(model, examples, *, device, temperature) -> [N]`, in their order.

plain   one padded row an example: right for every model, and the reference the others are compared with
"""
