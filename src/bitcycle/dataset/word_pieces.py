"""The pieces that words are written in, learned by merging: the same for the same words, wherever and whenever.

Pieces are single characters at first, ## in front of those within a word. Again and again the pair of neighbours that is most
frequent becomes a new piece. Source: Sennrich et al. 2016 (byte pair encoding), as the usual trainers of BERT's WordPiece do it.
Differs from that of the tokenizers library in what decides among equally frequent pairs: the alphabet, where theirs has the
order of a hash table with a random seed.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from itertools import pairwise

INSIDE = "##"
LEAST = 2
"""Pairs that are rarer than this are not merged."""


def word_pieces(words: Counter[str], size: int) -> list[str]:
    """At most `size` pieces for words with their frequencies: characters, the most frequent first, then merged pieces.

    >>> word_pieces(Counter({"low": 5, "lower": 2}), 7)
    ['##o', '##w', 'l', '##e', '##r', '##ow', 'low']
    """
    spelled = [[word[0], *(INSIDE + letter for letter in word[1:])] for word in sorted(words)]
    weights = [words[word] for word in sorted(words)]
    letters: Counter[str] = Counter()
    for pieces, weight in zip(spelled, weights):
        for piece in pieces:
            letters[piece] += weight
    found = dict.fromkeys(sorted(letters, key=lambda letter: (-letters[letter], letter))[:size])
    merger = _Merger(spelled, weights)
    while len(found) < size and (merged := merger.merge()) is not None:
        found[merged] = None
    return list(found)


class _Merger:
    """Words as pieces, and how often each pair of neighbours occurs, kept up to date."""

    def __init__(self, spelled: list[list[str]], weights: list[int]) -> None:
        self.spelled, self.weights = spelled, weights
        self.counts: Counter[tuple[str, str]] = Counter()
        self.places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for number in range(len(spelled)):
            self._count(number, 1)
        self.queue = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.queue)

    def _count(self, number: int, sign: int) -> None:
        pieces = self.spelled[number]
        for pair in pairwise(pieces):
            self.counts[pair] += sign * self.weights[number]
            if sign > 0:
                self.places[pair].add(number)

    def merge(self) -> str | None:
        """Merge the most frequent pair everywhere and return the new piece; None if all are rare."""
        while self.queue:
            count, pair = heapq.heappop(self.queue)
            if -count != self.counts[pair]:  # what it was when it was queued
                if self.counts[pair] > 0:
                    heapq.heappush(self.queue, (-self.counts[pair], pair))
                continue
            if -count < LEAST:
                return None
            return self._apply(pair)
        return None

    def _apply(self, pair: tuple[str, str]) -> str:
        new = pair[0] + pair[1].removeprefix(INSIDE)
        touched: set[tuple[str, str]] = set()
        for number in self.places.pop(pair):
            self._count(number, -1)
            self.spelled[number] = pieces = _merged(self.spelled[number], pair, new)
            self._count(number, 1)
            touched.update(both for both in pairwise(pieces) if new in both)
        for both in touched:
            heapq.heappush(self.queue, (-self.counts[both], both))
        del self.counts[pair]
        return new


def _merged(pieces: list[str], pair: tuple[str, str], new: str) -> list[str]:
    result: list[str] = []
    position = 0
    while position < len(pieces):
        if position + 1 < len(pieces) and (pieces[position], pieces[position + 1]) == pair:
            result.append(new)
            position += 2
        else:
            result.append(pieces[position])
            position += 1
    return result
