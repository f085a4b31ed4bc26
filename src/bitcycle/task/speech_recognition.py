"""Speech recognition by CTC: character and word error rate.

    CER    100 * character edits between the greedily decoded and the reference text / characters of the reference texts
    WER    the same with words
    loss   -ln p(text | features), see `ctc.py`, mean over utterances (not specified by HLHLp)

Source: HLHLp, section 4.3 (CER of greedy decoding). Its WER uses a finite-state transducer with a retrained trigram, which was
not released; here the words, too, are decoded greedily.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.speech import SpeechDatasetOptions
from bitcycle.dataset.utterances import SpeechBatch, UtteranceBatches, Utterances
from bitcycle.optional_imports import require
from bitcycle.settings import setting
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup
from bitcycle.task.ctc import ctc_loss, edit_distances, greedy

logger = logging.getLogger(__name__)

LENGTH_POOL = 16
"""Number of batches whose utterances are sorted by length to reduce padding."""


@dataclass
class SpeechRecognitionOptions(TaskOptions):
    """Options of speech recognition."""

    takes = SpeechDatasetOptions

    name: str = "speech_recognition"
    evaluation_batch_size: int = setting(64, "utterances evaluated at once", minimum=1)

    def sample(self, info: DatasetInfo) -> Sample:
        return Sample((torch.zeros(1, info.shape.frames, info.shape.features, device="meta"),), samples=1)

    def build(self, setup: TaskSetup) -> "SpeechRecognition":
        require("torchmetrics", "speech")  # fail before training instead of at the first evaluation
        return SpeechRecognition(self, setup)


class SpeechRecognition(Task):
    """Speech recognition on three splits of utterances."""

    metric = "test_cer"
    higher_is_better = False
    validation_metric = "validation_loss"
    """For the learning rate and for selecting weights (HLHLp, section 4.3)."""
    majority_baseline = 0.0
    """Accuracy of an empty text, the output of a network that always predicts the blank, its most frequent symbol."""

    def __init__(self, options: SpeechRecognitionOptions, setup: TaskSetup) -> None:
        dataset: SpeechDatasetOptions = setup.dataset
        data, alphabet = dataset.load(setup.data_root, setup.seed), dataset.alphabet(setup.data_root)
        train, test, validation = (dataset.utterances(split or [], alphabet).to(setup.device) for split in data)
        self.options, self.splits = options, {"test": test, "validation": validation}
        self.training_batches = UtteranceBatches(train, setup.batch_size, LENGTH_POOL, setup.seed)
        self.evaluation = SpeechEvaluation(options, alphabet)
        self.is_checked = False

    @property
    def chance(self) -> float:
        """The character error rate of an empty text, in percent."""
        return 100.0

    def train(self, model: nn.Module, batch: SpeechBatch) -> StepOutput:
        """Loss, and 1 - (edits / characters) of the batch's greedily decoded texts, at least 0, as accuracy."""
        if not self.is_checked:
            self.is_checked = True
            self._warn_of_few_frames(model)
        logits, lengths = scores(model, batch)
        losses = ctc_loss(logits, lengths, batch.targets, batch.target_lengths)
        with torch.no_grad():
            found, counts = greedy(logits, lengths)
            edits = edit_distances(found, counts, batch.targets, batch.target_lengths).sum()
            accuracy = (1 - edits / batch.target_lengths.sum().clamp_min(1)).clamp_min(0)
        return StepOutput(losses.mean(), accuracy.float())

    def _warn_of_few_frames(self, model: nn.Module) -> None:
        """Warn of utterances that the network has too few output frames for, as with a large `model.stack`."""
        for name, utterances in {"training": self.training_batches.utterances, **self.splits}.items():
            frames: Tensor = model.output_lengths(utterances.lengths)  # type: ignore[operator]
            if few := int((frames < utterances.needed_frames).sum()):
                problem = "%d of %d %s utterances have fewer frames than their transcripts need: their loss counts as 0"
                logger.warning(f"{problem}. Correct them, or lower model.stack", few, len(utterances), name)

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """`test_cer` and `test_wer` (not of the validation split) in percent, `test_loss`."""
        return self.evaluation.measure(model, self.splits[split], split, words=split == "test")


class SpeechEvaluation:
    """Evaluation of a network on utterances."""

    def __init__(self, options: SpeechRecognitionOptions, alphabet: Sequence[str]) -> None:
        self.options, self.alphabet = options, alphabet

    @torch.no_grad()
    def measure(self, model: nn.Module, utterances: Utterances, split: str, words: bool = True) -> dict[str, float]:
        """Metrics of a model in evaluation mode, with the prefix `split`, including WER if `words`."""
        from torchmetrics.text import CharErrorRate, WordErrorRate

        loss, cer, wer = 0.0, CharErrorRate(), WordErrorRate()
        for indices in torch.arange(len(utterances)).split(self.options.evaluation_batch_size):
            batch = utterances.batch(indices)
            logits, lengths = scores(model, batch)
            losses = ctc_loss(logits, lengths, batch.targets, batch.target_lengths)
            loss += float(losses.cpu().double().sum())
            wanted = [utterances.transcripts[index] for index in indices.tolist()]
            found = texts(logits, lengths, self.alphabet)
            cer.update(found, wanted)
            if words:
                wer.update(found, wanted)
        rates = {f"{split}_cer": cer, **({f"{split}_wer": wer} if words else {})}
        percent = {name: round(100 * float(rate.compute()), 4) for name, rate in rates.items()}
        return {**percent, f"{split}_loss": loss / len(utterances)}


def scores(model: nn.Module, batch: SpeechBatch) -> tuple[Tensor, Tensor]:
    """Logits [N, T, S] of a batch and the number of valid frames [N], given by the network's `output_lengths`."""
    lengths: Tensor = model.output_lengths(batch.lengths)  # type: ignore[operator]
    return model(batch.features), lengths


def texts(logits: Tensor, lengths: Tensor, alphabet: Sequence[str]) -> list[str]:
    """Greedily decoded texts, stripped of white space. Logits [N, T, S], lengths [N]."""
    found, counts = greedy(logits, lengths)
    rows = zip(found.tolist(), counts.tolist(), strict=True)
    return ["".join(alphabet[symbol - 1] for symbol in row[:count]).strip() for row, count in rows]
