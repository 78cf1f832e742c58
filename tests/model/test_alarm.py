"""The warning about collapsed routers: named layers, only after it lasts."""

import logging
from types import SimpleNamespace

import pytest
import torch

from mula_titan.components import metrics
from mula_titan.components.load_balance import RouterReport
from mula_titan.components.metrics import MulaMetricsProcessor


def _report(layer: int, busiest_share: float) -> RouterReport:
    return RouterReport(layer, 1.0, busiest_share, 0, 1.0, 1.0, 0)


def test_alarm_names_layers_that_stay_collapsed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor = object.__new__(MulaMetricsProcessor)
    processor.config = MulaMetricsProcessor.Config(router_alarm=0.75, router_alarm_after=3)
    processor.parallel_dims, processor.model_parts = SimpleNamespace(), []
    processor.num_layers, processor.top_k, processor.is_reporter = 2, 2, True
    processor.step_valid_tokens, processor._collapsed_for = torch.tensor(8), {}

    # Layer 1: with top-2, a share of 0.45 of the choices is 90 % of the tokens. It recovers once.
    shares = [0.45, 0.45, 0.2, 0.45, 0.45, 0.45]
    warned = []
    for step, share in enumerate(shares):
        monkeypatch.setattr(metrics, "router_report", lambda *a, s=share: [_report(0, 0.2), _report(1, s)])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            scalars = processor._router_metrics(step)
        assert scalars["router/layer_1/busiest_share"] == share
        warned.append([record.getMessage() for record in caplog.records])
    assert warned[:5] == [[]] * 5
    assert len(warned[5]) == 1
    assert "layer 1 90%" in warned[5][0] and "layer 0" not in warned[5][0]
