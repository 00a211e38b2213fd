"""Lower bounds that hold for every plan of a step on the same lengths, whatever it moves, queues or places where."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from rlhfless.models.plan import LowerBound
from rlhfless.models.profile import Profile
from rlhfless.policies.base import StepView
from rlhfless.solver.relaxation import alone_seconds, readable_tokens, work_seconds
from rlhfless.traces.trace import FloatArray, IntArray


def step_lower_bound(view: StepView, response_tokens: IntArray) -> LowerBound:
    """Bound the generation time and GPU seconds of any plan of a step, prefill and transfers left out.

    * The actors' GPUs are held for what all responses take together
      (:func:`~rlhfless.solver.relaxation.work_seconds`).
    * The slowest actor takes at least what the slowest single response takes
      (:func:`~rlhfless.solver.relaxation.alone_seconds`), and all together have the cluster's GPUs.

    Neither looks at which actor makes a token, so both also hold with migration. Where actors have several sizes,
    an iteration takes no less than on the fastest, and no fewer GPU seconds than on the cheapest. Tokens that a
    response has from an earlier step are not made again.
    """
    profiles = (view.profile, *view.variants)
    length = np.asarray(response_tokens, dtype=np.int64)
    before = np.zeros_like(length) if view.generated is None else view.generated
    left = np.flatnonzero(length > before)
    if not len(left):
        return LowerBound(generation_seconds=0.0, gpu_seconds=0.0)
    first = view.prompt_tokens[left] + before[left]
    tokens = (length - before)[left].astype(np.float64)
    resident = first * tokens + tokens * (tokens - 1) / 2
    reads = readable_tokens(max(p.actor.kv_capacity_tokens for p in profiles), view.options.engine)
    work = work_seconds(*_least_tables(profiles, per_gpu=True), reads, first, tokens, resident)
    base, kv = _least_tables(profiles, per_gpu=False)
    last = first + tokens.astype(np.int64)
    alone = float(alone_seconds(base, kv, first, last, int(first.min())).max())
    gpus = view.cluster.gpus if len(profiles) > 1 else view.most_actors * view.profile.actor.gpus
    return LowerBound(generation_seconds=max(alone, work / gpus), gpu_seconds=work)


def _least_tables(profiles: Sequence[Profile], *, per_gpu: bool) -> tuple[FloatArray, FloatArray]:
    """Return base and kv by running responses that no profile undercuts, in seconds or in GPU seconds."""
    most = max(profile.actor.max_running for profile in profiles)
    least = np.full((2, most + 1), inf)
    for profile in profiles:
        tables = np.array(profile.decode_tables) * (profile.actor.gpus if per_gpu else 1)
        least[:, : tables.shape[1]] = np.minimum(least[:, : tables.shape[1]], tables)
    return least[0], least[1]
