"""Language modelling: predict each token from the preceding ones; metrics are cross-entropy and perplexity.

A network is called with tokens [T, N] and its state after the previous batch (None: initial). It returns logits [T, N,
V] and its new state, a tuple of tensors (empty if stateless). The state is carried over between batches and detached.

Source: released code of Better Schedules, cpt_ptb (streams); fairseq's language models (blocks).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.text import TextDatasetOptions
from bitcycle.dataset.token_stream import (
    DrawnTokenStreams,
    TokenBatch,
    TokenBlocks,
    TokenStreams,
    block_epoch,
    mean_length,
    stream_epoch,
)
from bitcycle.device import scalar, widest_float
from bitcycle.settings import SettingError, setting
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, check_shares

Batches = TokenStreams | TokenBlocks


@dataclass
class LanguageModellingOptions(TaskOptions):
    """Options of language modelling on streams: `training.batch_size` parallel streams through the whole text."""

    takes = TextDatasetOptions
    can_be_shared = True

    name: str = "language_modelling"
    sequence_length: int = setting(
        35,
        "tokens per stream and step, the length of truncated backpropagation (Better Schedules: 35; HLHLp: 20)",
        minimum=1,
    )
    loss: str = setting(
        "token_mean",
        "mean over all tokens, or sum over time and mean over streams (time_sum: HLHLp's recipe, after"
        " Zaremba et al. 2014)",
        choices=("token_mean", "time_sum"),
    )
    lengths: str = setting(
        "fixed",
        "time steps of a training batch: sequence_length (fixed), or random around it with a proportional learning rate"
        " (drawn: AWD-LSTM)",
        choices=("fixed", "drawn"),
    )
    evaluation_batch_size: int = setting(
        10, "streams in evaluation; the incomplete remainder is dropped (released code: 10)", minimum=1
    )

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        length = self.sequence_length if self.lengths == "fixed" else mean_length(self.sequence_length)
        epoch = stream_epoch(info.train_samples, batch_size, length)
        if not epoch.samples:
            problem = f"{info.train_samples} training tokens are too few for {batch_size} streams"
            raise SettingError("training.batch_size", batch_size, problem, "lower it, or train on more text")
        return epoch

    def parts(self, samples: int, batch_size: int) -> int:
        return batch_size  # streams

    def sample(self, info: DatasetInfo) -> Sample:
        tokens = torch.zeros(self.sequence_length, 1, dtype=torch.int64, device="meta")
        return Sample((tokens,), samples=self.sequence_length)

    def build(self, setup: TaskSetup) -> "LanguageModelling":
        return LanguageModelling(self, setup)

    def training_batches(self, tokens: Tensor, batch_size: int, seed: int) -> Batches:
        """Return the batches of the training text."""
        if self.lengths == "drawn":
            return DrawnTokenStreams(tokens, batch_size, self.sequence_length, seed)
        return TokenStreams(tokens, batch_size, self.sequence_length)

    def evaluation_batches(self, tokens: Tensor) -> Batches:
        """Return the batches of the validation or test text."""
        return TokenStreams(tokens, self.evaluation_batch_size, self.sequence_length)


@dataclass
class BlockLanguageModellingOptions(LanguageModellingOptions):
    """Options of language modelling on blocks: `training.batch_size` per step, in random order, without context."""

    name: str = "language_modelling_blocks"
    lengths: str = setting("fixed", "time steps of a block: sequence_length (fixed)", choices=("fixed",))
    sequence_length: int = setting(256, "tokens per block (FracTrain, appendix D: 256)", minimum=1)
    evaluation_batch_size: int = setting(16, "blocks evaluated at once", minimum=1, affects_result=False)

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        epoch = block_epoch(info.train_samples, batch_size, self.sequence_length)
        if not epoch.samples:
            problem = f"{info.train_samples} training tokens are less than one block"
            raise SettingError("sequence_length", self.sequence_length, problem, "lower it")
        return epoch

    def parts(self, samples: int, batch_size: int) -> int:
        return samples // self.sequence_length

    def training_batches(self, tokens: Tensor, batch_size: int, seed: int) -> Batches:
        return TokenBlocks(tokens, batch_size, self.sequence_length, seed)

    def evaluation_batches(self, tokens: Tensor) -> Batches:
        return TokenBlocks(tokens, self.evaluation_batch_size, self.sequence_length)


class LanguageModelling(Task):
    """A language modelling task; perplexity is exp of the mean cross-entropy over all tokens."""

    metric, validation_metric = "test_perplexity", "validation_perplexity"
    unit, higher_is_better = "", False

    def __init__(self, options: LanguageModellingOptions, setup: TaskSetup) -> None:
        check_shares(options.evaluation_batch_size)
        text = setup.dataset.load(setup.data_root, setup.seed)
        train, validation, test = (split.to(setup.device) for split in text[:3])
        self.options, self.device = options, setup.device
        self.training_batches = options.training_batches(train, setup.batch_size, setup.seed)
        self.splits = {"test": options.evaluation_batches(test), "validation": options.evaluation_batches(validation)}
        for name, batches in self.splits.items():
            if not any(batch.targets.numel() for batch in batches.of_epoch()):
                size, problem = options.evaluation_batch_size, f"the {name} text is too short"
                raise SettingError("task.evaluation_batch_size", size, problem, "lower it, or give a longer text")
        self.majority_baseline = float(train.bincount().max()) / len(train)
        self.vocabulary = setup.info.shape.vocabulary
        self.counts_bytes = setup.dataset.unit == "byte"
        self.state: tuple[Tensor, ...] = ()

    @property
    def chance(self) -> float:
        """The perplexity of equal probabilities: the size of the vocabulary."""
        return float(self.vocabulary)

    def train(self, model: nn.Module, batch: TokenBatch) -> StepOutput:
        before = self.state if batch.continues else ()
        losses, right, state = _losses(model, batch.share(), before or None)
        self.state = tuple(part.detach() for part in state)
        loss = losses.mean()
        if self.options.loss == "time_sum":
            loss = loss * len(batch.inputs)
        return StepOutput(loss, right.float().mean())

    def rate_factor(self, batch: TokenBatch) -> float:
        return len(batch.inputs) / self.options.sequence_length if self.options.lengths == "drawn" else 1.0

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """`test_perplexity`, `test_loss`, the mean cross-entropy in nats, and that of bytes in bits, `test_bits_per_byte`."""
        state: tuple[Tensor, ...] | None = None
        wide = widest_float(self.device)
        sums = torch.zeros(2, dtype=wide, device=self.device)  # of losses, and their number
        for batch in self.splits[split].of_epoch():
            mine = batch.share()
            if not mine.targets.numel():
                continue
            with distributed.sharded(batch.streams):
                losses, _, state = _losses(model, mine, state if batch.continues else None)
            sums += torch.stack([losses.sum(dtype=wide), scalar(losses.numel(), wide, losses.device)])
        total, count = distributed.all_sum(sums).tolist()
        mean = total / count
        found = {f"{split}_perplexity": math.exp(min(mean, 700.0)), f"{split}_loss": mean}
        return found | ({f"{split}_bits_per_byte": mean / math.log(2)} if self.counts_bytes else {})

    def begin_anew(self) -> None:
        self.state = ()

    def state_dict(self) -> dict[str, Any]:
        return {"state": tuple(distributed.whole(part, self.training_batches.count, dim=-2) for part in self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = tuple(distributed.local_shard(part, dim=-2).to(self.device) for part in state["state"])


def _losses(
    model: nn.Module, batch: TokenBatch, state: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Cross-entropy of each target and whether it was predicted, both [T N], and the network's next state."""
    logits, state = model(batch.inputs, state)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return losses, (logits.detach().argmax(2) == batch.targets).flatten(), state or ()
