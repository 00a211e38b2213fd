"""How a step is planned: small parts with one idea each, and policies composed of them."""

from rlhfless.models.plan import ActorPlan, Learner, Migration, Plan, Predicted, Prefill, Prewarm
from rlhfless.policies.assign import Chunked, SortedEven
from rlhfless.policies.base import Policy, StepView
from rlhfless.policies.composed import Composed
from rlhfless.policies.place import ByDistance, OnLearner
from rlhfless.policies.predict import Ewma, Oracle
from rlhfless.policies.prefill import DeduplicatedPrefill, LocalPrefill
from rlhfless.policies.prewarm import NoPrewarm, ShortestPast
from rlhfless.policies.scale import FixedActors, MinMaxScore
from rlhfless.policies.simulate import Setting, SimulatedStep, simulate

__all__ = [
    "ActorPlan",
    "ByDistance",
    "Chunked",
    "Composed",
    "DeduplicatedPrefill",
    "Ewma",
    "FixedActors",
    "Learner",
    "LocalPrefill",
    "Migration",
    "MinMaxScore",
    "NoPrewarm",
    "OnLearner",
    "Oracle",
    "Plan",
    "Policy",
    "Predicted",
    "Prefill",
    "Prewarm",
    "Setting",
    "ShortestPast",
    "SimulatedStep",
    "SortedEven",
    "StepView",
    "simulate",
]
