"""Lower bounds that hold for every plan on the same lengths."""

from __future__ import annotations

import numpy as np

from rlhfless.models.plan import LowerBound
from rlhfless.policies.base import StepView
from rlhfless.traces.trace import FloatArray, IntArray


def step_lower_bound(view: StepView, response_tokens: IntArray) -> LowerBound:
    """Bound the generation time and GPU seconds of any plan of a step, prefill and transfers left out.

    With base(b) and kv(b) the decode tables, h the lower convex envelope of base over 1..max_running, T the
    tokens, L the longest response and I the iterations of all actors together:

    * every response needs each of its iterations, so one actor runs at least L of them, and no iteration
      makes more than max_running tokens: I >= max(L, T / max_running);
    * the iterations' base time is at least I * h(T / I) (Jensen), smallest at the least I, unless h(b) / b
      has its minimum at fewer running responses than T / I;
    * the KV term is at least min kv times the resident tokens that each response's own iterations read,
      sum over responses of p L + L (L - 1) / 2;
    * the slowest of N actors takes at least an N-th of all, and at least what the worst single response
      takes at the smallest base and kv.

    Seconds are those of one decode actor's GPUs; generation has as many actors as the cluster holds.
    """
    profile = view.profile
    base, kv = (table[1:] for table in profile.decode_tables)
    length = response_tokens.astype(np.float64)
    own_resident = view.prompt_tokens * length + length * (length - 1) / 2
    tokens, most = float(length.sum()), profile.actor.max_running
    envelope = _lower_convex_envelope(base)
    running = np.arange(1, most + 1)
    iterations = max(float(length.max()), tokens / most)
    cheapest = int(np.argmin(envelope / running))
    at = min(tokens / iterations, float(running[cheapest]))
    base_seconds = tokens * float(np.interp(at, running, envelope)) / at
    work = base_seconds + float(kv.min()) * float(own_resident.sum())
    alone = float((length * base.min() + kv.min() * own_resident).max())
    return LowerBound(
        generation_seconds=max(alone, work / view.most_actors), gpu_seconds=work * profile.actor.gpus
    )


def _lower_convex_envelope(values: FloatArray) -> FloatArray:
    """Return the largest convex function below ``values`` on 1..n (Andrew's monotone chain)."""
    x = np.arange(1, len(values) + 1, dtype=np.float64)
    hull: list[int] = []
    for i in range(len(values)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (x[i] - x[a]) < (values[i] - values[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    envelope: FloatArray = np.interp(x, x[hull], values[hull])
    return envelope
