"""Over-provisioning: more prompts are launched than a step trains on, and it ends when enough are complete.

APRIL (arXiv 2509.18521) keeps what the others have generated and resumes them first in the next step;
RollPacker (arXiv 2509.21009) puts them off to a long round. Both change which responses a step trains on.
"""

from __future__ import annotations

import numpy as np

from rlhfless.models.decode import DecodePool
from rlhfless.models.moves import Decoded, run_to_end
from rlhfless.traces.trace import BoolArray


def deliver_first(pool: DecodePool, prompts: int) -> tuple[Decoded, BoolArray]:
    """Run all actors until ``prompts`` prompts have all their responses; return which responses those are.

    At that instant every actor stops at its next iteration boundary and is released. Prompts that complete
    in the same instant count in the order of their numbers.
    """
    ahead = pool.copy()
    run_to_end(ahead)
    complete = np.zeros(int(pool.group.max()) + 1)
    np.maximum.at(complete, pool.group, ahead.finish)
    first = np.lexsort((np.arange(len(complete)), complete))[:prompts]
    if len(first) == len(complete):
        return run_to_end(pool), np.ones(len(pool.group), dtype=np.bool_)
    now = float(complete[first].max())
    release = np.array([pool.run(actor, until=now) for actor in range(len(pool))])
    return Decoded(release, ()), np.isin(pool.group, first)
