"""Connectionist temporal classification: loss, greedy decoding and edit distances, computed on the device; prefix beam search.

    loss     -ln p(z | x), p(z | x) = sum of prod_t y_t(path_t) over all paths that become z when repeats are merged
             and then blanks removed
    greedy   the path of the most probable symbols, with repeats merged and blanks removed
    prefix   the text with the maximum probability summed over its paths, with a language model (`PrefixSearch`)

Source: Graves et al. 2006, sections 3.1 to 3.2 ("best path decoding").
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcycle.dataset.utterances import BLANK
from bitcycle.device import to_device


def ctc_loss(logits: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """-ln p(z | x) of each utterance [N]; 0, without gradient, if there are fewer frames than the targets need.

    Logits [N, T, S] and targets [N, L]; lengths [N] on the CPU. On a GPU, PyTorch sums the gradient in a
    nondeterministic order; with deterministic algorithms (training.deterministic) it is computed on the CPU instead.
    """
    device = logits.device
    scores = F.log_softmax(logits.float(), 2).transpose(0, 1)
    if device.type != "cpu" and torch.are_deterministic_algorithms_enabled():
        scores, targets = scores.cpu(), targets.cpu()
    losses = F.ctc_loss(scores, targets, lengths, target_lengths, blank=BLANK, reduction="none", zero_infinity=True)
    return losses.to(device)


def greedy(logits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable path as (symbols [N, T], padded with blanks; number of symbols [N]).

    >>> path = torch.tensor([[0, 2, 2, 0, 2, 1, 1]])
    >>> greedy(F.one_hot(path, 3).float(), torch.tensor([6]))
    (tensor([[2, 2, 1, 0, 0, 0, 0]]), tensor([3]))
    """
    path = logits.argmax(2)
    frames = path.shape[1]
    before = F.pad(path, (1, 0), value=BLANK)[:, :frames]
    real = torch.arange(frames, device=path.device) < to_device(lengths, path.device)[:, None]
    kept = real & (path != BLANK) & (path != before)
    places = torch.where(kept, kept.cumsum(1) - 1, frames)  # removed symbols are written to a column that is cut off
    found = torch.full((len(path), frames + 1), BLANK, device=path.device, dtype=path.dtype)
    return found.scatter(1, places, path)[:, :frames], kept.sum(1)


def edit_distances(found: Tensor, found_lengths: Tensor, wanted: Tensor, wanted_lengths: Tensor) -> Tensor:
    """Minimum number [N] of insertions, deletions and replacements between rows of [N, A] and [N, B] (Levenshtein 1966).

    Each row of the dynamic programme is computed at once: first the moves from above and from the diagonal, then those
    from the left as a running minimum of (value - column). No step synchronises with the host.

    >>> edit_distances(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([[2, 3, 3]]), torch.tensor([3]))
    tensor([2])
    """
    device = found.device
    places = torch.arange(wanted.shape[1] + 1, device=device)
    row = places.repeat(len(found), 1)
    found_lengths, wanted_lengths = to_device(found_lengths, device), to_device(wanted_lengths, device)
    for index in range(found.shape[1]):
        replaced = row[:, :-1] + (found[:, index, None] != wanted)
        new = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, replaced)], 1)
        new = (new - places).cummin(1).values + places
        row = torch.where((index < found_lengths)[:, None], new, row)
    return row.gather(1, wanted_lengths[:, None])[:, 0]


BEGIN, END = "<s>", "</s>"
BACK_OFF = 0.4
NEVER = -math.inf
LEAST = math.log(1e-4)
"""Symbols below this log probability extend no prefix, which makes the search several times faster."""


class WordTrigram:
    """Word trigram language model with stupid back-off: scores a word given the two preceding words.

        S(w | u v) = c(u v w) / c(u v)   if u v w occurred, else  0.4 S(w | v)
        S(w | v)   = c(v w) / c(v)       if v w occurred,   else  0.4 S(w)
        S(w)       = c(w) / N            if w occurred,     else  0.4 / N

    A sentence is preceded by two begin tokens and followed by an end token, which is predicted like a word. N counts all words
    and end tokens. S is not normalised. Source: Brants et al. 2007, section 4. The last line, for unseen words, is ours.

    Args:
        transcripts: sentences of words separated by white space.

    >>> model = WordTrigram(["the cat", "the dog"])
    >>> [round(math.exp(model.score(*words)), 3) for words in (("<s>", "<s>", "the"), ("<s>", "the", "cat"), ("a", "the", "cat"))]
    [1.0, 0.5, 0.2]
    """

    def __init__(self, transcripts: Iterable[str]) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.contexts: Counter[tuple[str, ...]] = Counter()
        self.total = 0
        for text in transcripts:
            words = [BEGIN, BEGIN, *text.split(), END]
            self.total += len(words) - 2
            for place in range(2, len(words)):
                for order in range(3):
                    gram = tuple(words[place - order : place + 1])
                    self.counts[gram] += 1
                    self.contexts[gram[:-1]] += 1

    def score(self, before: str, last: str, word: str) -> float:
        """ln S(word | before last)."""
        penalty = 0.0
        for gram in ((before, last, word), (last, word), (word,)):
            if count := self.counts[gram]:
                return penalty + math.log(count / self.contexts[gram[:-1]])
            penalty += math.log(BACK_OFF)
        return penalty - math.log(max(self.total, 1))


class Ends(NamedTuple):
    """Log probabilities of a prefix's paths that end in a blank, and of those that end in its last character."""

    blank: float
    character: float

    @property
    def both(self) -> float:
        """Log probability of the prefix."""
        return log_add(self.blank, self.character)


@dataclass
class PrefixSearch:
    """Prefix beam search with the characters of symbols 1, 2, ... (symbol 0 is the blank) and a language model of words.

        value(text) = ln p_ctc(text | x) + language_weight ln S(words of the text) + word_bonus (number of words)

    After each frame the best `beam` prefixes are kept, each with two probabilities: of its paths that end in a blank, and of the
    others; symbols whose log probability is below `least` extend none. A word is scored when a space ends it, the last word and
    the end of the sentence after the last frame. With a beam as large as the number of prefixes, the search is exact. Source:
    Graves et al. 2006, section 3.2; Hannun et al. 2014, algorithm 1. Replaces the decoder of HLHLp (weighted finite-state
    transducers with a retrained trigram, after Miao et al. 2015), which was not released.
    """

    alphabet: Sequence[str]
    language: WordTrigram | None = None
    beam: int = 64
    language_weight: float = 1.0
    word_bonus: float = 0.0
    least: float = LEAST

    def __post_init__(self) -> None:
        self.symbols = {character: symbol for symbol, character in enumerate(self.alphabet, 1)}

    def __call__(self, log_probabilities: Sequence[Sequence[float]]) -> str:
        """Return the best text, stripped of white space, given log probabilities [T][S] of symbols in each frame."""
        beams: dict[str, Ends] = {"": Ends(0.0, NEVER)}
        words: dict[str, float] = {"": 0.0}
        for frame in log_probabilities:
            following = self._step(beams, frame)
            values = {prefix: ends.both + self._words_value(prefix, words) for prefix, ends in following.items()}
            kept = sorted(values, key=lambda prefix: (-values[prefix], prefix))[: self.beam]
            beams = {prefix: following[prefix] for prefix in kept}
        final = {prefix: ends.both + self._final_value(prefix, words) for prefix, ends in beams.items()}
        return min(final, key=lambda prefix: (-final[prefix], prefix)).strip()

    def _step(self, beams: dict[str, Ends], frame: Sequence[float]) -> dict[str, Ends]:
        """Extend all prefixes by one frame."""
        following: dict[str, Ends] = {}
        likely = [
            (self.alphabet[symbol - 1], frame[symbol]) for symbol in range(1, len(frame)) if frame[symbol] > self.least
        ]
        for prefix, ends in beams.items():
            both = ends.both
            repeated = ends.character + frame[self.symbols[prefix[-1]]] if prefix else NEVER
            self._add(following, prefix, both + frame[0], repeated)
            for character, score in likely:
                before = ends.blank if prefix.endswith(character) else both  # a repeat needs a blank in between
                self._add(following, prefix + character, NEVER, before + score)
        return following

    @staticmethod
    def _add(beams: dict[str, Ends], prefix: str, blank: float, character: float) -> None:
        known = beams.get(prefix, Ends(NEVER, NEVER))
        beams[prefix] = Ends(log_add(known.blank, blank), log_add(known.character, character))

    def _words_value(self, prefix: str, known: dict[str, float]) -> float:
        """Score of the complete words in `prefix`; cached in `known`."""
        if prefix not in known:
            value = self._words_value(prefix[:-1], known)
            if prefix[-1] == " " and prefix[:-1].split() and prefix[-2] != " ":
                value += self._word_value(prefix.split())
            known[prefix] = value
        return known[prefix]

    def _word_value(self, words: list[str], counts: bool = True) -> float:
        """Score of the last of `words` given the preceding ones."""
        bonus = self.word_bonus if counts else 0.0
        if self.language is None:
            return bonus
        before, last, word = [BEGIN, BEGIN, *words][-3:]
        return self.language_weight * self.language.score(before, last, word) + bonus

    def _final_value(self, prefix: str, known: dict[str, float]) -> float:
        value, words = self._words_value(prefix, known), prefix.split()
        if words and not prefix.endswith(" "):
            value += self._word_value(words)
        return value + self._word_value([*words, END], counts=False)


def log_add(a: float, b: float) -> float:
    """ln(e^a + e^b)."""
    if a < b:
        a, b = b, a
    return a if b == NEVER else a + math.log1p(math.exp(b - a))
