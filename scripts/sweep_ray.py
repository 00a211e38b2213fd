"""A Hydra launcher on Ray: every job of a sweep is a Ray task.

Hydra's own Ray plugin composes all configurations in the driver, brings AWS's client library, and pins
cloudpickle below what joblib needs; this one needs ``ray`` alone. ``hydra/launcher=ray`` starts Ray on this machine
or joins the cluster that ``RAY_ADDRESS`` or ``hydra.launcher.init.address`` names; nothing is fetched from a network.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhfless.traces.errors import InputError


class RayLauncher(Launcher):
    """Runs jobs as Ray tasks; ``init`` and ``remote`` are arguments of ``ray.init`` and ``ray.remote``."""

    def __init__(self, init: DictConfig, remote: DictConfig) -> None:
        self.init, self.remote = init, remote
        self.context: HydraContext
        self.task: TaskFunction
        self.config: DictConfig

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives a launcher."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs and return what they gave, in their order.

        Raises
        ------
        InputError
            When Ray is not installed.

        """
        if importlib.util.find_spec("ray") is None:
            raise InputError("hydra/launcher=ray needs Ray: pip install 'rlhfless[ray]'")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning of many lines
        ray: Any = importlib.import_module("ray")
        setup_globals()
        ours = not ray.is_initialized()
        if ours:
            ray.init(**_plain(self.init))
        try:
            run = ray.remote(_execute).options(**_plain(self.remote))
            shared = ray.put((self.context, self.config, self.task, Singleton.get_state()))
            jobs = [
                run.remote(shared, initial_job_idx + number, list(overrides))
                for number, overrides in enumerate(job_overrides)
            ]
            results: list[JobReturn] = ray.get(jobs)
            return results
        finally:
            if ours:
                ray.shutdown()


def _plain(node: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _execute(
    shared: tuple[HydraContext, DictConfig, TaskFunction, dict[Any, Any]], number: int, overrides: list[str]
) -> JobReturn:
    """Run one job in a worker."""
    context, config, task, singletons = shared
    setup_globals()
    Singleton.set_state(singletons)
    own = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(own):
        own.hydra.job.id = f"{own.hydra.job.name}_{number}"
        own.hydra.job.num = number
    HydraConfig.instance().set_config(own)
    return run_job(
        hydra_context=context,
        config=own,
        task_function=task,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
