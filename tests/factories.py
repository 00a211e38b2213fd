"""Small profiles and batches for tests."""

from __future__ import annotations

from typing import Any

from rlhfless.models.profile import Profile


def profile(**changes: Any) -> Profile:
    """Return a small profile; a change is ``part__key=value`` or ``key=value``."""
    values: dict[str, Any] = {
        "name": "test",
        "model": "Test-1B",
        "gpu": "T",
        "kind": "measured",
        "actor": {"gpus": 2, "max_running": 64, "kv_capacity_tokens": 1_000_000},
        "decode": {
            "batch": [1, 8, 64],
            "base_seconds": [0.010, 0.012, 0.020],
            "kv_token_seconds": [1.0e-7, 1.2e-7, 1.5e-7],
        },
        "prefill": {
            "gpus": 2,
            "fixed_seconds": 0.005,
            "token_seconds": 1.0e-5,
            "token2_seconds": 1.0e-9,
            "max_batch_tokens": 4096,
        },
        "stages": {
            "reward": {"gpus": 0, "fixed_seconds": 0.1},
            "reference": {"gpus": 2, "fixed_seconds": 0.2, "token_seconds": 1.0e-6},
            "value": {"gpus": 2, "fixed_seconds": 0.2, "token_seconds": 1.0e-6},
            "update_actor": {"gpus": 4, "fixed_seconds": 0.5, "token_seconds": 1.0e-5},
            "update_critic": {"gpus": 4, "fixed_seconds": 0.5, "token_seconds": 8.0e-6},
        },
        "memory": {"weight_bytes": 2.0e9, "kv_bytes_per_token": 3.0e4},
        "links": {
            "within_node": {"bytes_per_second": 2.0e10, "latency_seconds": 1.0e-5},
            "between_nodes": {"bytes_per_second": 1.0e10, "latency_seconds": 3.0e-5},
        },
        "functions": {"cold_start_seconds": 20.0, "warm_start_seconds": 1.0, "keep_alive_seconds": 600.0},
        "source": {"decode": "made up for tests"},
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            values[part][name] = value
        else:
            values[part] = value
    return Profile.parse(values, "test profile")
