"""From an engine's recipe to its runner and its controller."""

from __future__ import annotations

import json
from pathlib import Path

from surge_beam.gpu.dummy import is_dummy, refuse_cuda
from surge_beam.gpu.dummy_runner import TOKEN_BYTES, DummyRunner, step_seconds
from surge_beam.gpu.runner import Runner
from surge_beam.policy.phases import PhaseController, make_controller
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts
from surge_beam.records import EngineConfig, SurgeError

_DUMMY_BYTES = 1 << 20


def load_runner(config: EngineConfig) -> Runner:
    """The model of a recipe with its KV pool.

    Raises:
      SurgeError: if the model or the device is not there, or the pool would hold no page.
    """
    if is_dummy(config.model):
        refuse_cuda(config)
        pages = (config.kv_bytes or _DUMMY_BYTES) // (TOKEN_BYTES * config.page_size)
        return DummyRunner(pages, config.page_size, seconds=step_seconds(config.model))
    from surge_beam.gpu.model_runner import load_model_runner

    return load_model_runner(config)


def load_controller(config: EngineConfig, runner: Runner) -> PhaseController:
    """The schedule of a recipe, over the step times of its profile.

    Raises:
      SurgeError: if the profile cannot be read.
    """
    return make_controller(
        config.schedule,
        step_costs(config.profile),
        kv_tokens=runner.pages * runner.page_size,
        page_size=runner.page_size,
        prefill_budget=config.max_prefill_tokens,
    )


def step_costs(profile: str | None) -> StepCosts:
    """Step times of a profile that ``step_times`` wrote; cautious ones without.

    Raises:
      SurgeError: if it cannot be read.
    """
    if profile is None:
        return CAUTIOUS
    try:
        return StepCosts.from_dict(json.loads(Path(profile).read_text("utf-8"))["step_costs"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SurgeError(
            f"profile {profile} cannot be read ({error}); write one with "
            "python -m surge_beam.gpu.step_times"
        ) from error
