"""Lets DLRover judge the page of the metrics port XPU_TIMER_PORT as its agent and its master would.

The agent's collector fetches and filters the page; the master's judge gets seven such pages, a
minute apart. Prints `hung` or `healthy` in its last line. The argument names the state for the log.
"""

import sys
import time
from unittest import mock

from dlrover.python.diagnosis.common.constants import DiagnosisDataType
from dlrover.python.diagnosis.common.diagnosis_data import WorkerTrainingMetric
from dlrover.python.diagnosis.datacollector import xpu_timer_metric_collector

with mock.patch.object(xpu_timer_metric_collector, "MasterClient"):  # there is no master to report to
    collector = xpu_timer_metric_collector.XpuTimerMetricsCollector()
assert collector.is_enabled(), "the metrics port is not in use"
page = collector.collect_data()
print(sys.argv[1], *(line for line in page.splitlines() if "HANG" in line), sep="\n")

now = int(time.time())
data = [
    WorkerTrainingMetric(
        timestamp=now - 60 * (6 - minute),
        data_type=DiagnosisDataType.XPU_TIMER_METRIC,
        data_content=page,
        node_id=0,
        node_type="worker",
        node_rank=0,
    )
    for minute in range(7)
]


class Manager:
    """The source of the judge's data."""

    def get_data(self, kind):
        return data if kind == DiagnosisDataType.XPU_TIMER_METRIC else []


def hangs():
    try:  # DLRover after 0.6
        from dlrover.python.diagnosis.diagnostician.training_hang import TrainingHangDiagnostician

        return TrainingHangDiagnostician(mock.MagicMock(), Manager()).is_hang_by_xpu_timer_metric(data)
    except ImportError:
        from dlrover.python.diagnosis.common.inference_chain import InferenceAttribute
        from dlrover.python.diagnosis.inferencechain.inferenceoperator.observer import check_training_hang_operator

        operator = check_training_hang_operator.CheckTrainingHangOperator(Manager())
        return [answer.attribution for answer in operator.infer([])] == [InferenceAttribute.IS]


print("hung" if hangs() else "healthy")
