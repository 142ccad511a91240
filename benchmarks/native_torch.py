"""The decoder of `decoder.py` as a module of torch, without Keras."""

import decoder
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional

# Keras's defaults.
NORM_EPSILON = 1e-3
ADAM_EPSILON = 1e-7


class Attention(nn.Module):
    """Causal self-attention on the heads that this process holds."""

    def __init__(self, hidden):
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x):
        heads = (
            layer(x).unflatten(-1, (-1, decoder.HEAD_SIZE)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A block of the decoder: attention, then two dense layers."""

    def __init__(self, hidden):
        super().__init__()
        self.norm_a = nn.LayerNorm(hidden, eps=NORM_EPSILON)
        self.attention = Attention(hidden)
        self.norm_b = nn.LayerNorm(hidden, eps=NORM_EPSILON)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.attention(self.norm_a(x))
        return x + self.down(functional.gelu(self.up(self.norm_b(x))))


class Decoder(nn.Module):
    """The whole decoder, from tokens to logits."""

    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(decoder.VOCABULARY, options.hidden)
        self.blocks = nn.ModuleList(
            Block(options.hidden) for _ in range(options.layers)
        )
        self.logits = nn.Linear(options.hidden, decoder.VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def copy_weights(self, keras_weights):
        """Takes over the weights of the Keras model, `get_weights()`."""
        arrays = iter(keras_weights)
        with torch.no_grad():
            for layer in self._layers_in_order():
                for parameter in layer.parameters():
                    value = torch.from_numpy(next(arrays))
                    if isinstance(layer, nn.Linear):
                        # Keras: (in, out), with heads as dims of their own.
                        value = value.reshape(*parameter.shape[::-1])
                        value = value.T if parameter.ndim == 2 else value
                    parameter.copy_(value)
        if next(arrays, None) is not None:
            raise ValueError("The Keras model has more weights.")

    def _layers_in_order(self):
        yield self.tokens
        for block in self.blocks:
            attention = block.attention
            yield block.norm_a
            yield from (attention.query, attention.key, attention.value)
            yield attention.output
            yield from (block.norm_b, block.up, block.down)
        yield self.logits


def parallelize_plan(options):
    """Returns the plan of `parallelize_module`, with `decoder.LAYOUTS`."""
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "logits": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(options.layers):
        block = f"blocks.{i}"
        # One all-reduce for the gradients of query, key and value together.
        plan[f"{block}.attention"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        for name in ("attention.query", "attention.key", "attention.value"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        plan[f"{block}.attention.output"] = RowwiseParallel()
        plan[f"{block}.up"] = ColwiseParallel()
        plan[f"{block}.down"] = RowwiseParallel()
    return plan


def make_optimizer(model):
    """Returns the optimizer, with torch's defaults where Keras's agree."""
    parameters = list(model.parameters())
    # On CUDA devices torch would update all at once, which it cannot do with
    # the split and the whole parameters of `parallelize_module`.
    split = any(isinstance(parameter, DTensor) for parameter in parameters)
    return torch.optim.Adam(
        parameters,
        decoder.LEARNING_RATE,
        eps=ADAM_EPSILON,
        foreach=False if split else None,
    )


def loss_of(model, options):
    """Returns a function of tokens and targets that returns the loss."""

    def loss(tokens, targets):
        logits = model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return torch.compile(loss) if options.jit else loss


def train_epoch(loss_of, optimizer, x, y, device):
    """Trains one epoch as a loop of torch, and returns the mean loss.

    Args:
        loss_of: Function of tokens and targets, from `loss_of`.
        optimizer: What `make_optimizer` returned.
        x: Tensor of tokens, on the host.
        y: Tensor of targets, int64, on the host.
        device: String, the device of the model.
    """
    losses = []
    for tokens, targets in zip(
        x.split(decoder.BATCH_SIZE), y.split(decoder.BATCH_SIZE)
    ):
        loss = loss_of(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())
