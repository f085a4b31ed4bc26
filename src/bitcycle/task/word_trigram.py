"""Word trigram language model with stupid back-off (Brants et al. 2007, section 4), from the training transcripts.

    S(w | u v) = c(u v w) / c(u v)   if u v w occurred, else  0.4 S(w | v)
    S(w | v)   = c(v w) / c(v)       if v w occurred,   else  0.4 S(w)
    S(w)       = c(w) / N            if w occurred,     else  0.4 / N

A sentence is preceded by two begin tokens and followed by an end token, which is predicted like a word. N counts all
words and end tokens. S is not normalised. The last line, for unseen words, is ours.
"""

import math
from collections import Counter
from collections.abc import Iterable

BEGIN, END = "<s>", "</s>"
BACK_OFF = 0.4


class WordTrigram:
    """Scores a word given the two preceding words.

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

    def sentence(self, text: str) -> float:
        """ln S of a whole sentence, including its end."""
        words = [BEGIN, BEGIN, *text.split(), END]
        return sum(self.score(*words[place - 2 : place + 1]) for place in range(2, len(words)))
