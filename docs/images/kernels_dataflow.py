"""Draws docs/images/kernels_dataflow.png: which kernel reads and writes what in one MoE layer.

python docs/images/kernels_dataflow.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

KERNEL, TENSOR, SAVED = "#c7ddf2", "#f3f3f3", "#fbe3b5"
FORWARD = [
    ("ids (T,K)", TENSOR, 0.0, 0),
    ("index\ncount, scan, assign", KERNEL, 1.0, 0),
    ("plan\nslot of pick, pick of slot,\nsegments, expert of tile", SAVED, 2.15, 0),
    ("x (T,D), W1, W3", TENSOR, 0.0, 1),
    ("gate_up\ngathers rows, two products,\nSwiGLU in the epilogue", KERNEL, 1.0, 1),
    ("gate_up (R,2F)", SAVED, 2.15, 1.28),
    ("h (R,F)", TENSOR, 2.15, 0.78),
    ("down\nh W2ᵀ", KERNEL, 3.15, 1),
    ("y (R,D)", TENSOR, 4.0, 1),
    ("combine\nΣ weight · y, fp32", KERNEL, 4.9, 1),
    ("out (T,D)", TENSOR, 5.8, 1),
]
BACKWARD = [
    ("dout (T,D)", TENSOR, 0.0, 2.2),
    ("gather", KERNEL, 0.85, 2.2),
    ("down_backward\ndout W2", KERNEL, 1.8, 2.2),
    ("swiglu_backward\ndgate, dup over gate_up,\nweight · h over dh, dweights", KERNEL, 3.15, 2.2),
    ("dgate_up (R,2F)", TENSOR, 4.55, 2.2),
    ("gate_up_backward\ndgate W1 + dup W3", KERNEL, 3.15, 3.1),
    ("dx (R,D)", TENSOR, 4.25, 3.1),
    ("combine\nplain sum, fp32", KERNEL, 5.1, 3.1),
    ("dx (T,D)", TENSOR, 6.0, 3.1),
    ("down_weight_grad\ndoutᵀ (weight · h)", KERNEL, 0.85, 3.1),
    ("dW2", TENSOR, 1.8, 3.1),
    ("gather x, some columns\nat a time", KERNEL, 1.8, 4.0),
    ("gate_up_weight_grad\ndgateᵀ x, dupᵀ x", KERNEL, 3.15, 4.0),
    ("dW1, dW3", TENSOR, 4.25, 4.0),
]
ARROWS = [
    (0.28, 0, 0.6, 0), (1.42, 0, 1.6, 0), (2.15, 0.26, 1.2, 0.72), (0.42, 1, 0.5, 1), (1.52, 1.1, 1.78, 1.24),
    (1.52, 0.9, 1.85, 0.8), (2.42, 0.8, 2.85, 0.95), (3.4, 1, 3.72, 1), (4.26, 1, 4.45, 1), (5.3, 1, 5.5, 1),
    (0.35, 2.2, 0.62, 2.2), (1.1, 2.2, 1.38, 2.2), (2.2, 2.2, 2.58, 2.2), (2.3, 1.44, 2.9, 1.98), (3.72, 2.2, 4.1, 2.2),
    (4.5, 2.36, 3.5, 2.9), (3.68, 3.1, 3.95, 3.1), (4.55, 3.1, 4.7, 3.1), (5.5, 3.1, 5.7, 3.1), (0.85, 2.36, 0.85, 2.9),
    (2.75, 2.38, 1.35, 2.95), (1.33, 3.1, 1.62, 3.1), (4.6, 2.36, 3.62, 3.82), (2.28, 4.0, 2.6, 4.0),
    (3.7, 4.0, 3.92, 4.0),
]  # fmt: skip


def box(axis: Axes, text: str, color: str, x: float, y: float) -> None:
    axis.text(
        x, y, text, ha="center", va="center", fontsize=8, bbox={"boxstyle": "round,pad=0.4", "fc": color, "ec": "#555"}
    )


def main() -> None:
    figure, axis = plt.subplots(figsize=(12, 7), layout="constrained")
    for x0, y0, x1, y1 in ARROWS:
        axis.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "->", "color": "#555"})
    for text, color, x, y in FORWARD + BACKWARD:
        box(axis, text, color, x, y)
    axis.text(-0.45, -0.45, "forward", fontsize=11, weight="bold")
    axis.text(-0.45, 1.75, "backward", fontsize=11, weight="bold")
    axis.text(3.6, -0.2, "blue: kernel    grey: tensor    yellow: kept for backward", fontsize=9)
    axis.set_xlim(-0.5, 6.4)
    axis.set_ylim(4.4, -0.6)
    axis.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
