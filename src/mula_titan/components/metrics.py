"""Metrics: a rich progress line, TensorBoard, a JSON-lines log and the loss curve as a picture."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank
from torchtitan.tools.logging import logger

from mula_titan.components.load_balance import router_report

METRICS_FILE = "metrics.jsonl"
LOSS_PLOT = "loss.png"


class MulaMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics with progress, history and plot.

    Files in the dump folder: ``metrics.jsonl``, one object a record; ``loss.png``, drawn at each validation and at the
    end; TensorBoard events where torchtitan puts them. A resumed run continues the history.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        enable_tensorboard: bool = True
        """Whether to log metrics to TensorBoard"""

        enable_plot: bool = True
        """Draw loss.png in the dump folder"""

        router_alarm: float = 0.75
        """
        Warn when a router collapses: its busiest expert has more than this part of the tokens, `router_alarm_after`
        logged steps in a row. 1 never warns.
        """

        router_alarm_after: int = 10
        """Logged steps in a row before the warning; routers often collapse in a run's first steps and recover."""

    def __init__(
        self,
        config: Config,
        *,
        parallel_dims: Any,
        dump_folder: str = "./outputs",
        pp_schedule: str = "1F1B",
        **kwargs: Any,
    ):
        super().__init__(
            config, parallel_dims=parallel_dims, dump_folder=dump_folder, pp_schedule=pp_schedule, **kwargs
        )
        self.total_steps = 0
        self.folder = Path(dump_folder)
        self.is_reporter = dist.get_rank() == _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        self._progress: Progress | None = None
        self._history: list[dict[str, Any]] = []
        self._validation_loss: float | None = None
        self._first: tuple[int, float] | None = None
        # Set by the trainer for Mixture-of-Experts models.
        self.num_layers = 0
        self.top_k = 0
        self.step_valid_tokens: torch.Tensor | None = None
        self._collapsed_for: dict[int, int] = {}

    def start(self, step: int, total_steps: int) -> None:
        """Begin (or resume after ``step``) a run of ``total_steps``: open the progress line, cut the history there."""
        self.total_steps = total_steps
        self._first = (step, time.perf_counter())
        self.time_last_log = time.perf_counter()
        if not self.is_reporter:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / METRICS_FILE
        if path.exists():
            records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            self._history = [record for record in records if record["step"] <= step]
        path.write_text("".join(json.dumps(record) + "\n" for record in self._history))
        console = Console()
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._progress.add_task("train", total=total_steps, completed=step, status="first step, compiling")
            self._progress.start()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Record one training step.

        Args:
            step: optimizer steps done.
            global_avg_loss: cross-entropy in nats a token, mean over all valid tokens of the step.
            global_max_loss: largest mean of one rank.
            grad_norm: norm before clipping.
            extra_metrics: further scalars by name.
        """
        now = time.perf_counter()
        seconds = max(now - self.time_last_log, 1e-9)
        tokens_per_device = self.ntokens_since_last_log / (seconds * self.parallel_dims.non_data_parallel_size)
        tokens = tokens_per_device * self.parallel_dims.world_size
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tokens_per_device,
            "throughput/tokens_per_second": tokens,
            "tflops": self.num_flops_per_token * tokens_per_device / 1e12,
            "mfu(%)": 100 * self.num_flops_per_token * tokens_per_device / self.gpu_peak_flops,
            "time_metrics/data_loading(%)": 100 * sum(self.data_loading_times) / seconds,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            **self._router_metrics(step),
            **(extra_metrics or {}),
        }
        self.logger.log(metrics, step)
        self._record({"step": step, "loss": global_avg_loss, "grad_norm": grad_norm, "tokens_per_second": tokens})
        self._show(
            step, f"loss {global_avg_loss:.4f}  grad {grad_norm:.3f}  {tokens:,.0f} tokens/s", memory.max_reserved_gib
        )
        self._restart_interval()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Record the validation loss, in nats a token."""
        self.logger.log({"validation_metrics/loss": loss, **(extra_metrics or {})}, step)
        self._validation_loss = loss
        self._record({"step": step, "validation_loss": loss})
        if self.is_reporter:
            self._print(f"step {step:>6}  validation loss {loss:.4f}  perplexity {math.exp(min(loss, 700)):.2f}")
        self.plot()
        self._restart_interval()

    def plot(self) -> Path | None:
        """Draw the loss curves of the whole history; returns the picture's path on the reporting rank."""
        if not (self.is_reporter and self.config.enable_plot and self._history):
            return None
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for key, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
            points = [(r["step"], r[key]) for r in self._history if key in r]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
        axes.set(xlabel="step", ylabel="cross-entropy, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        path = self.folder / LOSS_PLOT
        figure.savefig(path, dpi=150)
        plt.close(figure)
        return path

    def close(self) -> None:
        """Finish the progress line, draw the plot, close the loggers."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self.plot()
        super().close()

    def _router_metrics(self, step: int) -> dict[str, float]:
        """Scalars of every router, and a warning for those that collapse. A collective call."""
        if not self.top_k or self.model_parts is None or self.step_valid_tokens is None:
            return {}
        num_tokens = int(self.step_valid_tokens)
        reports = router_report(self.model_parts, self.parallel_dims, self.num_layers, num_tokens * self.top_k)
        for report in reports:
            is_collapsed = report.busiest_share * self.top_k > self.config.router_alarm
            self._collapsed_for[report.layer] = self._collapsed_for.get(report.layer, 0) + 1 if is_collapsed else 0
        collapsed = [r for r in reports if self._collapsed_for[r.layer] >= self.config.router_alarm_after]
        if collapsed and self.is_reporter:
            shares = ", ".join(f"layer {r.layer} {r.busiest_share * self.top_k:.0%}" for r in collapsed)
            logger.warning(
                f"Step {step}: routers have collapsed, one expert takes most tokens: {shares}. "
                "Raise model.load_balance_loss or model.expert_bias_rate, or lower the learning rate."
            )
        return {f"router/layer_{r.layer}/{name}": value for r in reports for name, value in asdict(r).items()}

    def _record(self, record: dict[str, Any]) -> None:
        if not self.is_reporter:
            return
        self._history.append(record)
        with (self.folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _show(self, step: int, text: str, memory_gib: float) -> None:
        if not self.is_reporter:
            return
        status = f"{text}  ETA {self._eta(step)}"
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, status=status)
        else:
            self._print(f"step {step:>6}/{self.total_steps}  {status}  memory {memory_gib:.1f} GiB")

    def _eta(self, step: int) -> str:
        first_step, first_time = self._first or (0, time.perf_counter())
        if step <= first_step:
            return "-"
        seconds = (time.perf_counter() - first_time) / (step - first_step) * (self.total_steps - step)
        return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"

    def _print(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text)
        else:
            print(text, flush=True)

    def _restart_interval(self) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()
