"""FLOPs and bytes of the instructions of an HLO module.

XLA's own count leaves out what its custom calls compute: matmuls of cuBLAS and
attention of cuDNN.
"""

import collections
import json
import math
import re

import numpy as np

# Instructions that move nothing: they name, or wait for, what others made.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
    "",
}
# Instructions that read as much of their first operand as they return.
_READ_A_PART = {"gather", "dynamic-slice", "slice"}
_FLASH_ATTENTION = "__cudnn$fmha"
# Matmuls of attention in the forward pass, and in the backward pass (Dao et al.
# 2022, "FlashAttention", section 3.1 and appendix B).
_FORWARD_MATMULS = 2
_BACKWARD_MATMULS = 5
_WINDOW = re.compile(r"(\w+)=([\dx_]+)")


def flops(module, computation, instruction):
    """Returns a `Counter` of dtype to the FLOPs of an instruction.

    Only matmuls and convolutions count, and those in called computations.

    Args:
        module: `hlo.Module`.
        computation: String, name of the computation of the instruction.
        instruction: `hlo.Instruction`.
    """
    found = collections.Counter()
    if instruction.opcode == "dot":
        dims = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        _add_dot(found, module, computation, instruction, dims.split(","))
    elif instruction.opcode == "convolution":
        _add_convolution(found, module, computation, instruction)
    elif instruction.opcode == "custom-call":
        target = instruction.attribute(r'custom_call_target="([^"]*)"')
        if target.startswith("__cublas"):
            numbers = _config(instruction)["dot_dimension_numbers"]
            dims = numbers["lhs_contracting_dimensions"]
            _add_dot(found, module, computation, instruction, dims)
        elif target.startswith(_FLASH_ATTENTION):
            _add_attention(found, module, computation, instruction, target)
        elif target.startswith("__cudnn$conv"):
            _add_convolution(found, module, computation, instruction)
    for name in instruction.called:
        if name in module and instruction.opcode != "while":
            for inner in module.instructions(name):
                found += flops(module, name, inner)
    return found


def moved_bytes(module, computation, instruction):
    """Returns the bytes that an instruction reads and writes.

    Args:
        module, computation, instruction: As for `flops`.
    """
    if instruction.opcode in _FREE:
        return 0
    written = sum(array.nbytes for array in instruction.results)
    if instruction.opcode in _READ_A_PART:
        return 2 * written
    if instruction.opcode == "dynamic-update-slice":
        update = _operand(module, computation, instruction, 1)
        return 2 * update.nbytes if update else written
    read = 0
    partly = _partly_read(module, instruction)
    for index, name in enumerate(instruction.operands):
        operand = module.by_name(computation).get(name)
        if operand is not None:
            whole = sum(array.nbytes for array in operand.results)
            read += min(whole, partly.get(index, whole))
    return read + written


def kernel(instruction):
    """Returns the name of the kernel of an attention; `""` for others."""
    if instruction.opcode != "custom-call":
        return ""
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    if target.startswith(_FLASH_ATTENTION):
        way = "backward" if "Backward" in target else "forward"
        return f"cuDNN flash attention, {way}"
    if target == "tpu_custom_call" and "splash" in instruction.text:
        return "Splash attention"
    return ""


def _partly_read(module, instruction):
    """Returns a dict of operand index to the bytes that a fusion reads of it.

    Only operands that nothing but gathers and slices read.
    """
    found = {}
    if instruction.opcode != "fusion":
        return found
    for name in instruction.called:
        if name not in module:
            continue
        rows = module.instructions(name)
        for row in rows:
            if row.opcode != "parameter":
                continue
            users = [user for user in rows if row.name in user.operands]
            if users and all(
                user.opcode in _READ_A_PART and user.operands[0] == row.name
                for user in users
            ):
                index = int(row.attribute(r"parameter\((\d+)\)"))
                found[index] = sum(
                    array.nbytes for user in users for array in user.results
                )
    return found


def _operand(module, computation, instruction, index):
    """Returns the `Array` of an operand, or `None`."""
    if index >= len(instruction.operands):
        return None
    made = module.by_name(computation).get(instruction.operands[index])
    return made.results[0] if made and made.results else None


def _add_dot(found, module, computation, instruction, dims):
    left = _operand(module, computation, instruction, 0)
    if left is None:
        return
    contracted = math.prod(left.shape[int(dim)] for dim in dims if dim != "")
    found[left.dtype] += 2 * math.prod(_result(instruction)) * contracted


def _result(instruction):
    return instruction.results[0].shape if instruction.results else ()


def _add_attention(found, module, computation, instruction, target):
    # (batch, length, heads, size) each.
    query = _operand(module, computation, instruction, 0)
    key = _operand(module, computation, instruction, 1)
    if query is None or key is None:
        return
    is_backward = "Backward" in target
    matmuls = _BACKWARD_MATMULS if is_backward else _FORWARD_MATMULS
    found[query.dtype] += 2 * matmuls * math.prod(query.shape) * key.shape[1]


def _add_convolution(found, module, computation, instruction):
    left = _operand(module, computation, instruction, 0)
    right = _operand(module, computation, instruction, 1)
    labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    if left is None or right is None or not labels:
        return
    inputs, rest = labels.split("_")
    kernels, outputs = rest.split("->")
    # cuDNN's gradients have the labels and the window of the forward pass.
    images, weights, result = left.shape, right.shape, _result(instruction)
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    if target.endswith("BackwardFilter"):
        weights, result = result, weights
    elif target.endswith("BackwardInput"):
        images, result = result, images
    window = dict(_WINDOW.findall(instruction.attribute(r"window=\{([^}]*)\}")))
    count = weights[kernels.index("i")]
    for dim, label in enumerate(outputs):
        if label.isdigit():
            count *= _pairs(
                images[inputs.index(label)],
                weights[kernels.index(label)],
                result[dim],
                {
                    name: text.split("x")[int(label)]
                    for name, text in window.items()
                },
            )
        else:
            count *= result[dim]
    found[left.dtype] += 2 * count


def _pairs(size, kernel, result, window):
    """Returns how many products a dim of a convolution has.

    A window may cover padding or the gaps of a dilated input. On TPUs, batched
    matmuls are such convolutions, with one product for each result.
    """
    stride, dilated, spread = (
        int(window.get(name, 1))
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    before = int(window.get("pad", "0_0").split("_")[0])
    at = (
        np.arange(result)[:, None] * stride
        + np.arange(kernel)[None] * spread
        - before
    )
    is_inside = (at >= 0) & (at < (size - 1) * dilated + 1)
    return int((is_inside & (at % dilated == 0)).sum())


def _config(instruction):
    start = instruction.text.find("backend_config=")
    text = instruction.text[start + len("backend_config=") :]
    config, _ = json.JSONDecoder().raw_decode(text)
    return config.get("gemm_backend_config", config)
