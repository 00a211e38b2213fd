"""The machines: nodes of equal GPUs, numbered through."""

from __future__ import annotations

from pydantic import field_validator

from rlhfless.models.hardware import find_gpu
from rlhfless.models.profile import Count, Links, Part, Profile
from rlhfless.traces.errors import InputError


class Cluster(Part):
    """``nodes`` machines of ``gpus_per_node`` GPUs; GPU ``g`` sits on node ``g // gpus_per_node``.

    Attributes
    ----------
    name: Name for outputs.
    nodes, gpus_per_node: Size.
    gpu: GPU type, spelled freely; none where it does not matter or is not known.
    links: Bandwidths and latencies that replace the profile's; see :meth:`adapt`.

    """

    name: str = "custom"
    nodes: Count
    gpus_per_node: Count
    gpu: str | None = None
    links: Links | None = None

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, name: str | None) -> str | None:
        return None if name is None else find_gpu(name).name

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    def node_of(self, gpu_id: int) -> int:
        """Return the node of a GPU.

        Raises
        ------
        InputError
            If there is no such GPU.

        """
        if not 0 <= gpu_id < self.gpus:
            raise InputError(f"cluster {self.name}: no GPU {gpu_id}, they are 0..{self.gpus - 1}")
        return gpu_id // self.gpus_per_node

    def adapt(self, profile: Profile) -> Profile:
        """Return the profile as it holds on this cluster: with the cluster's links, where it states any.

        Raises
        ------
        InputError
            If the profile is of another GPU type, or an actor has more GPUs than a node.

        """
        if self.gpu is not None and self.gpu != profile.gpu:
            raise InputError(
                f"cluster {self.name}: has {self.gpu}, but profile {profile.name} is of {profile.gpu}"
            )
        if profile.actor.gpus > self.gpus_per_node:
            raise InputError(
                f"cluster {self.name}: an actor of profile {profile.name} needs {profile.actor.gpus} GPUs "
                f"of one node, a node has {self.gpus_per_node}"
            )
        if self.links is None:
            return profile
        source = {**profile.source, "links": f"cluster {self.name}"}
        return profile.model_copy(update={"links": self.links, "source": source})
