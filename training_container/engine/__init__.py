"""The primitives that every recipe is made of; a recipe knows the engine, and the engine knows no recipe.

engine.sample(prompts, sampling, group_size=8)         completions with the log-probabilities they were drawn with
engine.forward(examples)                               log-probabilities of given tokens
engine.forward_backward(examples, loss_fn)             gradients of the full batch, however it is cut
engine.optim_step(learning_rate, max_grad_norm)        one AdamW step, unless the gradient is not finite
engine.save_state(folder) / load_state(folder)         all that the next step depends on, to the bit
engine.save_weights(folder)                            a model that AutoModelForCausalLM loads
"""

from .batch import Example, LossFn, Metrics, MicroBatch, Totals
from .core import Engine, OptimStep
from .sampler import Completion, Sampling

__all__ = ["Completion", "Engine", "Example", "LossFn", "Metrics", "MicroBatch", "OptimStep", "Sampling", "Totals"]
