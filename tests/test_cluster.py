"""Clusters: numbering, what is refused, and the committed ones."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml
from factories import profile

from rlhfless.models.cluster import Cluster
from rlhfless.models.hardware import GPUS
from rlhfless.traces.errors import InputError

COMMITTED = sorted(
    path.name for path in files("rlhfless.conf").joinpath("cluster").iterdir() if path.name.endswith(".yaml")
)


def committed(name: str) -> Cluster:
    text = files("rlhfless.conf").joinpath("cluster", name).read_text(encoding="utf-8")
    return Cluster.parse(yaml.safe_load(text), name)


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_clusters_are_what_their_names_say(name: str) -> None:
    cluster = committed(name)
    stem = name.removesuffix(".yaml")
    assert cluster.name == stem
    if stem != "custom":
        gpu, _, size = stem.partition("_")
        assert size == f"{cluster.nodes}x{cluster.gpus_per_node}"
        assert cluster.gpu is not None
        assert cluster.gpu.lower() == gpu
        assert cluster.gpu in GPUS


def test_the_testbed_of_the_paper() -> None:
    """Two servers of eight L40S: RLHFless (arXiv 2602.22718), sec. 6.1."""
    testbed = committed("l40s_2x8.yaml")
    assert testbed.gpus == 16
    assert [testbed.node_of(gpu) for gpu in range(16)] == [0] * 8 + [1] * 8
    with pytest.raises(InputError, match=r"no GPU 16, they are 0\.\.15"):
        testbed.node_of(16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0, "gpus_per_node": 8}, "c.yaml: nodes: .*greater than or equal to 1.*got 0"),
        ({"nodes": 1, "gpus_per_node": -8}, "c.yaml: gpus_per_node: .*got -8"),
        ({"nodes": 1.5, "gpus_per_node": 8}, "c.yaml: nodes: .*got 1.5"),
        ({"nodes": 1}, "c.yaml: gpus_per_node: Field required"),
        ({"nodes": 1, "gpus_per_node": 8, "racks": 2}, "c.yaml: racks: Extra inputs"),
        ({"nodes": 1, "gpus_per_node": 8, "gpu": "H1000"}, "c.yaml: gpu: .*closest is H100 .*known: L40S"),
        (
            {
                "nodes": 1,
                "gpus_per_node": 8,
                "links": {"within_node": {"bytes_per_second": 0}, "between_nodes": {"bytes_per_second": 1}},
            },
            "c.yaml: links.within_node.bytes_per_second: .*greater than 0",
        ),
    ],
)
def test_nonsense_is_refused_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Cluster.parse(values, "c.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_a_cluster_brings_its_own_links() -> None:
    link = {"bytes_per_second": 1.0e9, "latency_seconds": 0.0}
    cluster = Cluster.parse(
        {"nodes": 1, "gpus_per_node": 2, "links": {"within_node": link, "between_nodes": link}}, "c.yaml"
    )
    adapted = cluster.adapt(profile())
    assert adapted.links.within_node.seconds(2.0e9) == 2.0
    assert adapted.source["links"] == "cluster custom"
    assert adapted.decode == profile().decode


def test_a_profile_of_another_gpu_or_of_too_large_actors_is_refused() -> None:
    with pytest.raises(InputError, match="has L40S, but profile test is of T"):
        Cluster(nodes=1, gpus_per_node=8, gpu="L40S").adapt(profile())
    with pytest.raises(InputError, match="needs 2 GPUs of one node, a node has 1"):
        Cluster(nodes=4, gpus_per_node=1).adapt(profile())
