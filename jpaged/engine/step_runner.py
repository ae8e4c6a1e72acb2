"""StepRunner: steps on their way to the device and back, one ahead of the host where that is wanted.

Knows no requests. A step that fails is told of as lost, and the device is made usable again; a device that
goes on failing is given up.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.step_plan import SampledToken, StepPlan
from jpaged.errors import EngineDeadError
from jpaged.worker.model_runner import StepInFlight

logger = logging.getLogger("jpaged")

# One lost step may be a passing trouble; the device is given up with the last of so many in a row.
_MAX_LOST_STEPS = 3


class StepWorker(Protocol):
    """The part of a Worker that is used here."""

    def dispatch(self, plan: StepPlan, kv: KVCacheManager) -> StepInFlight: ...

    def collect(self, step: StepInFlight) -> Mapping[int, SampledToken]: ...

    def recover(self) -> None: ...


class Collected(NamedTuple):
    """A step that has run, and its tokens by sequence."""

    plan: StepPlan
    sampled: Mapping[int, SampledToken]


class StepsLost(Exception):
    """Steps have failed. `plans` are all that were in flight; pages hold nothing any more."""

    def __init__(self, plans: list[StepPlan]) -> None:
        super().__init__("a step failed")
        self.plans = plans


class StepRunner:
    """Sends plans to a worker. With `overlap` a step is collected when the next one has been sent."""

    def __init__(self, worker: StepWorker, kv: KVCacheManager, *, overlap: bool) -> None:
        self._worker = worker
        self._kv = kv
        self._overlap = overlap
        self._in_flight: tuple[StepPlan, StepInFlight] | None = None
        self._num_lost = 0

    def run(self, plan: StepPlan) -> Collected | None:
        """Sends a plan, if there is anything in it, and collects what is due.

        Raises StepsLost, or EngineDeadError where running them again is of no use.
        """
        before, self._in_flight = self._in_flight, None
        try:
            sent = (plan, self._worker.dispatch(plan, self._kv)) if plan.entries else None
            if not self._overlap:
                return self._collect(sent)
            # Kept before the wait: whatever comes of that one, this one is on the device.
            self._in_flight = sent
            return self._collect(before)
        except Exception as error:
            self._in_flight = None
            self._recover(error)
            raise StepsLost([plan] if before is None else [before[0], plan]) from error

    def settle(self) -> Collected | None:
        """Collects the step in flight. Raises as `run` does."""
        before, self._in_flight = self._in_flight, None
        try:
            return self._collect(before)
        except Exception as error:
            self._recover(error)
            raise StepsLost([before[0]] if before else []) from error

    def _collect(self, sent: tuple[StepPlan, StepInFlight] | None) -> Collected | None:
        if sent is None:
            return None
        collected = Collected(sent[0], self._worker.collect(sent[1]))
        self._num_lost = 0
        return collected

    def _recover(self, error: Exception) -> None:
        self._num_lost += 1
        if self._num_lost < _MAX_LOST_STEPS:
            logger.warning("a step failed and is run again", exc_info=error)
            try:
                self._worker.recover()
            except Exception as second:
                error = second
            else:
                return
        raise EngineDeadError(f"the step failed: {error}") from error
