"""How a step is planned: small parts with one idea each, and policies composed of them."""

from rlhfless.models.plan import ActorPlan, Learner, Migration, Plan, Predicted, Prefill, Prewarm
from rlhfless.policies.anywhere import Anywhere
from rlhfless.policies.assign import Chunked, SortedEven
from rlhfless.policies.balanced import KarmarkarKarp, Lpt, Multifit, Random, RoundRobin
from rlhfless.policies.base import Policy, StepView
from rlhfless.policies.check import check_policy
from rlhfless.policies.composed import Composed
from rlhfless.policies.grouped import ContiguousDp, GroupWorkers, TailSplit, TopK
from rlhfless.policies.migrate import RefittedCut
from rlhfless.policies.place import Apart, ByDistance, OnLearner
from rlhfless.policies.predict import Ewma, Oracle
from rlhfless.policies.prefill import DeduplicatedPrefill, LocalPrefill
from rlhfless.policies.prewarm import NoPrewarm, ShortestPast
from rlhfless.policies.ranks import Answers, LengthBucket, NoisyRank, PromptLength
from rlhfless.policies.sampling import AsRecorded, LongRounds, OverProvision
from rlhfless.policies.scale import FixedActors, MinMaxScore
from rlhfless.policies.simulate import Setting, SimulatedStep, simulate
from rlhfless.policies.tail_isolated import LearnerFirst, TailIsolated

__all__ = [
    "ActorPlan",
    "Answers",
    "Anywhere",
    "Apart",
    "AsRecorded",
    "ByDistance",
    "Chunked",
    "Composed",
    "ContiguousDp",
    "DeduplicatedPrefill",
    "Ewma",
    "FixedActors",
    "GroupWorkers",
    "KarmarkarKarp",
    "Learner",
    "LearnerFirst",
    "LengthBucket",
    "LocalPrefill",
    "LongRounds",
    "Lpt",
    "Migration",
    "MinMaxScore",
    "Multifit",
    "NoPrewarm",
    "NoisyRank",
    "OnLearner",
    "Oracle",
    "OverProvision",
    "Plan",
    "Policy",
    "Predicted",
    "Prefill",
    "Prewarm",
    "PromptLength",
    "Random",
    "RefittedCut",
    "RoundRobin",
    "Setting",
    "ShortestPast",
    "SimulatedStep",
    "SortedEven",
    "StepView",
    "TailIsolated",
    "TailSplit",
    "TopK",
    "check_policy",
    "simulate",
]
