"""Which tensors a model has on either side: native keys and shapes, and the Hugging Face tensors that each becomes."""

from dataclasses import dataclass

import torch

from mula_titan.hf.names import HEAD, hf_name, is_expert_bias
from mula_titan.model.args import MulaArgs
from mula_titan.model.spec import model_config


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: torch.Size
    native: str
    """Native key that holds its values."""
    expert: int | None
    """Index into the first dimension of the native tensor; None: the whole tensor."""


def native_shapes(args: MulaArgs) -> dict[str, torch.Size]:
    """Shape of every tensor in the model's state dict, in the model's order (built on the meta device).

    Raises:
        ValueError: the arguments describe no model.
    """
    with torch.device("meta"):
        model = model_config(args).build()
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def hf_tensors(args: MulaArgs) -> dict[str, list[HFTensor]]:
    """Hugging Face tensors of every native key; none for a tied head and for balancing biases.

    Raises:
        ValueError: a native key that the table of names lacks.
    """
    tensors: dict[str, list[HFTensor]] = {}
    unknown = []
    for native, shape in native_shapes(args).items():
        if is_expert_bias(native) or (args.tie_embeddings and native == HEAD):
            tensors[native] = []
            continue
        name = hf_name(native)
        if name is None:
            unknown.append(native)
        elif "{}" in name:
            tensors[native] = [HFTensor(name.format(e), shape[1:], native, e) for e in range(shape[0])]
        else:
            tensors[native] = [HFTensor(name, shape, native, None)]
    if unknown:
        raise ValueError(f"no Hugging Face name for {unknown}: add them to mula_titan.hf.names")
    return tensors


def check_tensors(found: dict[str, torch.Size], expected: dict[str, torch.Size], source: str) -> None:
    """Compare tensors of a checkpoint with those of the model.

    Raises:
        ValueError: one message that lists missing keys, left-over keys and differing shapes.
    """
    lines = [f"missing: {name}" for name in expected if name not in found]
    lines += [f"left over: {name}" for name in found if name not in expected]
    lines += [
        f"shape of {name}: {tuple(found[name])}, the model has {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if lines:
        shown = "\n  ".join(lines[:40])
        more = f"\n  and {len(lines) - 40} more" if len(lines) > 40 else ""
        raise ValueError(f"{source} doesn't fit the model that its description names:\n  {shown}{more}")
