"""Strategies: DP-FedAvg, for fedsim's engines and for any Flower app; and robust means."""

from fedsim.arguments import explain_calls
from fedsim.federation.aggregation.robust import Krum, Median, RobustMean, TrimmedMean
from fedsim.federation.buffered.schedule import ReleaseSchedule
from fedsim.federation.client_settings import ClientMetrics, ClientTraining, PrivateMetrics
from fedsim.federation.dp_fedavg import DPFedAvg
from fedsim.federation.optimizers import adam, sgd
from fedsim.federation.participants import Availability
from fedsim.federation.round_report import RoundReport, RunFailedError
from fedsim.federation.rounds import Rounds, round_timeout, rounds_of, run_to_end
from fedsim.mechanisms.bounded_values import ValueRange
from fedsim.privacy.placement import SecureAggregation
from fedsim.server_optimizers import ServerAdam, ServerOptimizer, ServerSGD

__all__ = [
    "Availability",
    "ClientMetrics",
    "ClientTraining",
    "DPFedAvg",
    "Krum",
    "Median",
    "PrivateMetrics",
    "ReleaseSchedule",
    "RobustMean",
    "RoundReport",
    "Rounds",
    "RunFailedError",
    "SecureAggregation",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSGD",
    "TrimmedMean",
    "ValueRange",
    "adam",
    "round_timeout",
    "rounds_of",
    "run_to_end",
    "sgd",
]

explain_calls(__name__)
