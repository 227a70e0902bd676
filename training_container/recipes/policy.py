"""The optimizer step that grpo and multi_turn share: from a scored rollout to new weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..advantages import group_advantages, has_spread
from ..defaults import rates_for
from ..engine import Engine, LossFn, Totals
from ..failures import UserFailure
from ..losses import Objective, policy_loss
from ..reference import Reference
from ..rollouts import Rollout, Trajectory, longest, minibatch, rewards_P_G, success_at
from ..run import Run


def objective_of(engine: Engine, run: Run) -> Objective:
    """What the settings ask for."""
    settings = run.settings
    return Objective(
        loss=settings.loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dro_beta=settings.dro_beta,
        normalise=settings.normalise,
        max_tokens=longest(run),
        kl_coef=settings.kl_coef,
        kl_estimator=settings.kl_estimator,
        off_policy_cap=None if engine.samples_exactly else settings.off_policy_cap,
    )


def with_logprobs(
    engine: Engine,
    run: Run,
    rollout: Rollout,
    objective: Objective,
    *,
    reference: Reference | None,
    loss: LossFn | None,
) -> Rollout:
    """The rollout with what the loss compares its tokens to, for all groups that reach the loss.

    The policy is asked again where the sampler's numbers are not its own: another program drew, or top_p cut the
    distribution, whose ratio to the whole one is no change of the policy.
    """
    again = not engine.samples_exactly or run.settings.top_p < 1.0
    if not again and reference is None:
        return rollout
    teaches = has_spread(rewards_P_G(run, rollout)).tolist()
    chosen = [index for index, flag in enumerate(teaches) if flag or _all_rows(objective, loss)]
    examples = [each.as_example(group=index) for index in chosen for each in rollout.groups[index]]
    with run.meter.phase("update"):
        old = engine.forward(examples, temperature=run.settings.temperature) if again else [[] for _ in examples]
        other = reference(examples) if reference else [[] for _ in examples]
    found = iter(zip(old, other, strict=True))
    groups = list(rollout.groups)
    for index in chosen:
        groups[index] = [_compared(each, *next(found)) for each in groups[index]]
    return replace(rollout, groups=groups)


def _all_rows(objective: Objective, loss: LossFn | None) -> bool:
    """Whether rows without an advantage may have a gradient all the same; of a user's loss nothing is known."""
    return objective.acts_without_advantage or loss is not None


def _compared(trajectory: Trajectory, old: list[float], reference: list[float]) -> Trajectory:
    return replace(trajectory, old_logprobs=old, reference_logprobs=reference)


def policy_update(
    engine: Engine, run: Run, rollout: Rollout, objective: Objective, *, loss: LossFn | None = None
) -> dict[str, float]:
    """The window's coming optimizer step, on its part of the rollout; none where no completion has an advantage.

    Rows without an advantage are left out where they have no gradient, and are counted in its mean all the same: the others
    weigh what they did. Truncated completions under `mask_truncated` are neither trained on nor counted.

    Args:
        loss: the user's own, in place of the objective's; it sees every row that counts.
    """
    settings, rates = run.settings, rates_for("grpo", run.spec.model)
    advantages_P_G = group_advantages(rewards_P_G(run, rollout), settings.advantage).tolist()
    counted = [
        (index, each, advantage)
        for index in minibatch(run, rollout)
        for each, advantage in zip(rollout.groups[index], advantages_P_G[index], strict=True)
        if each.sampled_tokens and not (settings.mask_truncated and each.truncated)
    ]
    if not any(advantage for _, _, advantage in counted):
        return {"loss": 0.0, "grad_norm": 0.0}
    all_rows = _all_rows(objective, loss)
    examples = [each.as_example(advantage, group=index) for index, each, advantage in counted if advantage or all_rows]
    totals = Totals(sum(each.sampled_tokens for _, each, _ in counted), len(counted))
    loss = loss or partial(policy_loss, objective=objective, trained=Totals.of(examples))

    with run.meter.phase("update"):
        metrics = engine.forward_backward(examples, loss, temperature=settings.temperature, totals=totals)
        rate = run.learning_rate(rates.learning_rate)
        max_grad_norm = settings.max_grad_norm or rates.max_grad_norm
        taken = engine.optim_step(rate, max_grad_norm, weight_decay=settings.weight_decay)
    # Between two policies, or to a distribution that was cut, it would be of no sampler's making.
    if settings.top_p < 1.0 or (run.state.update and not examples[0].old_logprobs):
        metrics.pop("sampler_gap", None)
    run.meter.count(trained=sum(example.trained_tokens for example in examples))
    run.count_skipped(taken.applied, "the gradient of the policy loss")
    return metrics | {"grad_norm": taken.grad_norm, "learning_rate": rate}


# --- giving up -----------------------------------------------------------------------------------------------------------


def give_up_if_constant(run: Run, rollout: Rollout) -> None:
    """End a run that cannot learn because no group's rewards ever differ. All completions right is another matter.

    Raises:
        UserFailure: max_constant_steps steps in a row were so.
    """
    solved = bool(rollout.scored) and min(rollout.scored) >= success_at(run)
    spread = has_spread(rewards_P_G(run, rollout)).any()
    state = run.state
    state.constant_steps = 0 if solved or spread else state.constant_steps + 1
    if state.constant_steps >= run.settings.max_constant_steps:
        raise UserFailure(
            f"The reward had no spread within any group for {state.constant_steps} steps in a row "
            f"(up to step {state.step}), so there was nothing to learn: {_why_constant(rollout)}."
        )


def _why_constant(rollout: Rollout) -> str:
    if not rollout.scored:
        return f"no completion was scored: {rollout.why_unscored}"
    low, high = min(rollout.scored), max(rollout.scored)
    if low == high:
        return f"every completion got {low:g}. Make the reward tell better from worse, or begin with a warm start"
    return "completions of the same prompt all got the same. Raise temperature or group_size, or grade more finely"


def say_if_nothing_was_learned(run: Run) -> None:
    if 0 < run.state.step == run.state.constant_steps:
        run.log.emit("notice", message="no step had any spread of reward within a group: the model learned nothing")
